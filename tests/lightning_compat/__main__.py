"""Run Lightning's own tests with goose3d: ``python -m tests.lightning_compat CHECKOUT``.

The checkout should be of the installed version of lightning; tests and library are of one piece.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.lightning_compat.cases import read_cases

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120
# Lightning's tests take warnings for errors; this one is of torch 2.13, in Lightning's all_gather.
KNOWN = "ignore:torch.distributed.nn.functional.all_gather is deprecated:FutureWarning"


def run(folder: Path, names: list[str], **variables: str) -> int:
    """Run tests in a pytest of their own; return its exit code."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    options = ["-q", "--no-header", f"--timeout={TIMEOUT_S}", "--tb=short", "-rf", "-W", KNOWN]
    plugin = ["-p", "tests.lightning_compat.plugin"]
    command = [sys.executable, "-m", "pytest", *plugin, *options, *names]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    """Run everything in the list; return 0 if all of it passed."""
    folder = Path(arguments[0]).resolve() / "tests" if len(arguments) == 1 else None
    if folder is None or not (folder / "tests_pytorch").is_dir():
        print("usage: python -m tests.lightning_compat PATH_OF_A_CHECKOUT_OF_PYTORCH_LIGHTNING")
        return 2
    cases = read_cases()
    codes = [run(folder, cases.files)]
    codes += [run(folder, [name], PL_RUN_STANDALONE_TESTS="1") for name in cases.alone]
    reasons = sorted(set(cases.excluded.values()))
    print(f"{len(cases.excluded)} entries are excluded, for {len(reasons)} reasons:")
    for reason in reasons:
        print(f"  {sum(other == reason for other in cases.excluded.values())} x {reason}")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
