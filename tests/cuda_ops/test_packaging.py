"""Wheels hold the sources, and the libraries where they could be built; their tags say which."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cuda_ops.sources import library_name
from tests.architecture.rules import ROOT
from tests.cuda_ops.compiled import CXX

pytestmark = pytest.mark.compile

BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def build_wheel(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build a wheel of a copy of the sources; a cut-down package keeps it short."""
    source = folder / "source"
    (source / "goose_strategy").mkdir(parents=True)
    (source / "goose_strategy" / "__init__.py").touch()
    (source / "goose_strategy" / "autoload").mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "lib")
    shutil.copytree(ROOT / "cuda_ops", source / "cuda_ops", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=source,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(autouse=True)
def _setuptools() -> None:
    pytest.importorskip("setuptools", "77", reason="needs setuptools >= 77, as the build does")


def contents(folder: Path) -> tuple[str, list[str]]:
    (wheel,) = folder.glob("*.whl")
    return wheel.name, zipfile.ZipFile(wheel).namelist()


def test_a_wheel_without_libraries_fits_everything(tmp_path: Path) -> None:
    done = build_wheel(tmp_path, CUDA_OPS="off")
    assert done.returncode == 0, done.stderr
    name, files = contents(tmp_path)
    assert name.endswith("-py3-none-any.whl")
    assert "cuda_ops/csrc/kernels.cuh" in files
    assert not [file for file in files if file.startswith("cuda_ops/lib/")]


def test_a_wheel_with_a_library_is_of_one_platform(tmp_path: Path) -> None:
    if CXX is None:
        pytest.skip("no C++ compiler")
    done = build_wheel(tmp_path, CUDA_OPS="cpu", CXX=CXX)
    assert done.returncode == 0, done.stderr
    name, files = contents(tmp_path)
    assert "-py3-none-linux_" in name
    assert [f for f in files if f.startswith("cuda_ops/lib/")] == [
        f"cuda_ops/lib/{library_name('cpu')}"
    ]


def test_without_any_compiler_a_wheel_is_built_and_says_why(tmp_path: Path) -> None:
    done = build_wheel(tmp_path, PATH="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert "cuda_ops: cpu not built: no C++ compiler" in done.stderr
    assert contents(tmp_path)[0].endswith("-py3-none-any.whl")


def test_what_was_asked_for_by_name_must_be_built(tmp_path: Path) -> None:
    done = build_wheel(tmp_path, PATH="/nonexistent", CUDA_OPS="cuda")
    assert done.returncode != 0
    assert "BuildError: no C++ compiler was found" in done.stderr
    assert list(tmp_path.glob("*.whl")) == []
