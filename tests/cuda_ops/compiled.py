"""Libraries for the tests: the CPU library, and the CUDA kernels for the emulator."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_ops.build import build, find_cxx
from cuda_ops.sources import CSRC, source_hash

CXX = find_cxx()

_BASE = ("-std=c++17", "-ffp-contract=off", "-fPIC", "-shared", "-DGOOSE_EMULATE", "-x", "c++")

# What an emulator need not instantiate to catch one bug: it compiles five times faster.
_FEWER = {
    "cuda.cu": (
        ("case GOOSE_LION: return main_of<GOOSE_LION>(*a, stream);", ""),
        ("case GOOSE_SGD: return main_of<GOOSE_SGD>(*a, stream);", ""),
        ("case GOOSE_MAIN_SPLIT16: return first_of<ALGORITHM, GOOSE_MAIN_SPLIT16>(a, stream);", ""),
        ("case GOOSE_MAIN_BF16: return first_of<ALGORITHM, GOOSE_MAIN_BF16>(a, stream);", ""),
        (
            "case GOOSE_MOMENT_BF16: return second_of<ALGORITHM, MAIN, "
            "GOOSE_MOMENT_BF16>(a, stream);",
            "",
        ),
    )
}


@dataclass(frozen=True)
class Bug:
    """A change of one source file.

    Args:
        name: Of the bug.
        file: In ``csrc``.
        right: Text that is there exactly once.
        wrong: What stands there instead.
    """

    name: str
    file: str
    right: str
    wrong: str


def cpu_library(folder: Path) -> Path:
    """Return the CPU library, built into a folder that may be kept for the next run."""
    return build(["cpu"], folder=folder)["cpu"]


def emulator(
    folder: Path, *, bugs: Sequence[Bug] = (), flags: Sequence[str] = ("-O1",), fewer: bool = False
) -> Path:
    """Return the CUDA kernels as a library for the CPU.

    Args:
        folder: Where to build; what is there already for the same sources is returned.
        bugs: Changes of the sources.
        flags: Of the compiler.
        fewer: Leave most variants away.
    """
    key = hashlib.sha256(repr((source_hash(), bugs, flags, fewer)).encode()).hexdigest()[:12]
    path = folder / f"emulated-{key}.so"
    if path.exists():
        return path
    sources = folder / f"csrc-{key}-{os.getpid()}"
    shutil.copytree(CSRC, sources)
    for file, changes in _FEWER.items() if fewer else ():
        for right, wrong in changes:
            _replace(sources / file, right, wrong)
    for bug in bugs:
        _replace(sources / bug.file, bug.right, bug.wrong)
    made = sources / "made.so"
    assert CXX is not None
    subprocess.run(
        [CXX, *_BASE, *flags, f"-I{sources}", str(sources / "cuda.cu"), "-o", str(made)],
        check=True,
        capture_output=True,
        text=True,
    )
    made.replace(path)
    shutil.rmtree(sources)
    return path


def cpu_library_with(folder: Path, flags: Sequence[str]) -> Path:
    """Return the CPU library with one set of loops, compiled with the given flags."""
    key = hashlib.sha256(repr((source_hash(), flags)).encode()).hexdigest()[:12]
    path = folder / f"loops-{key}.so"
    if not path.exists():
        made = folder / f"loops-{key}-{os.getpid()}.so"
        options = ("-DGOOSE_TABLE=table_baseline", "-DGOOSE_BASELINE_ONLY", f"-I{CSRC}")
        sources = (str(CSRC / "cpu.cpp"), str(CSRC / "cpu_loops.cpp"))
        assert CXX is not None
        command = [
            CXX,
            "-std=c++17",
            "-fPIC",
            "-pthread",
            "-shared",
            *flags,
            *options,
        ]
        subprocess.run([*command, *sources, "-o", str(made)], check=True, capture_output=True)
        made.replace(path)
    return path


def _replace(path: Path, right: str, wrong: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(right) == 1, f"{right!r} stands {text.count(right)} times in {path.name}"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
