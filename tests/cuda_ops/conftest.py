from __future__ import annotations

from pathlib import Path

import pytest

from cuda_ops.bindings import Library
from tests.cuda_ops import compiled


@pytest.fixture(scope="session")
def built(pytestconfig: pytest.Config) -> Path:
    """A folder for built libraries, kept between runs; skips where there is no C++ compiler."""
    if compiled.CXX is None:
        pytest.skip("no C++ compiler (g++, c++, clang++ or CXX)")
    if pytestconfig.cache is None:
        pytest.skip("pytest runs without its cache folder, where the libraries are built")
    return Path(pytestconfig.cache.mkdir("cuda_ops"))


@pytest.fixture(scope="session")
def cpu(built: Path) -> Library:
    return Library(compiled.cpu_library(built))


@pytest.fixture(scope="session")
def emulated(built: Path) -> Library:
    return Library(compiled.emulator(built))
