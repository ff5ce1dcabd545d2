"""Kernels and CPU loops run without an error of memory or undefined behaviour."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from cuda_ops.bindings import Library
from tests.cuda_ops.compiled import CXX, cpu_library_with, emulator
from tests.cuda_ops.test_planted_bugs import LOAD, run

pytestmark = [
    pytest.mark.sanitize,
    pytest.mark.skipif(
        not os.environ.get("GOOSE3D_SANITIZE"),
        reason="sanitized builds take a minute: make sanitize",
    ),
]

FLAGS = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)


@pytest.fixture(scope="module")
def preload() -> dict[str, str]:
    """Python itself is not sanitized, so the sanitizer's library comes first by LD_PRELOAD."""
    assert CXX is not None
    found = subprocess.run(
        [CXX, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{CXX} has no libasan")
    return {"LD_PRELOAD": str(Path(found).resolve()), "ASAN_OPTIONS": "detect_leaks=0"}


@pytest.mark.timeout(120)
def test_kernels(built: Path, cpu: Library, preload: dict[str, str]) -> None:
    done = run(emulator(built, flags=FLAGS, fewer=True), cpu, **preload)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {}


@pytest.mark.timeout(120)
def test_cpu_loops(built: Path, cpu: Library, preload: dict[str, str]) -> None:
    done = run(cpu_library_with(built, ("-ffp-contract=off", *FLAGS)), cpu, **preload)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {}


@pytest.mark.timeout(120)
def test_a_planted_load_beyond_the_tail_is_reported(
    built: Path, cpu: Library, preload: dict[str, str]
) -> None:
    done = run(emulator(built, bugs=[LOAD], flags=FLAGS, fewer=True), cpu, **preload)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "kernels.cuh" in done.stderr
