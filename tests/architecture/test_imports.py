"""The import contracts of pyproject.toml hold, and they do find what breaks them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.rules import ROOT

_LINT = (
    "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
)


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the packages in ``folder`` with the configuration found there."""
    return subprocess.run(
        [sys.executable, "-c", _LINT],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_contracts_hold() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def skeleton(tmp_path: Path) -> Path:
    """A package with every room of the contract and nothing in them."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers, *_ = settings["tool"]["importlinter"]["contracts"]
    rooms = [room.strip("() ") for layer in layers["layers"] for room in layer.split("|")]
    for package in ("cuda_ops", "goose_strategy", *(f"goose_strategy/{room}" for room in rooms)):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("goose_strategy/comm/x.py", "import goose_strategy.optim"),
        ("goose_strategy/models/x.py", "import goose_strategy.optim"),
        (
            "goose_strategy/tensor_parallel/x.py",
            "def f():\n    import goose_strategy.data_parallel",
        ),
        ("goose_strategy/runtime/x.py", "import lightning"),
        ("goose_strategy/new_room/__init__.py", ""),
        ("cuda_ops/x.py", "import goose_strategy"),
    ],
)
def test_a_planted_import_breaks_them(skeleton: Path, module: str, line: str) -> None:
    (skeleton / module).parent.mkdir(exist_ok=True)
    (skeleton / module).write_text(line + "\n", encoding="utf-8")
    done = lint(skeleton)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout


def test_an_empty_skeleton_keeps_them(skeleton: Path) -> None:
    done = lint(skeleton)
    assert done.returncode == 0, done.stdout + done.stderr
