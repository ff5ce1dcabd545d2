"""Bugs of the kinds that CUDA kernels have are found by the tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cuda_ops.bench.cases import compare
from cuda_ops.bindings import Library
from tests.architecture.rules import ROOT
from tests.cuda_ops.compiled import Bug, emulator
from tests.cuda_ops.test_equal_bits import Guarded
from tests.cuda_ops.worker import VARIANTS

BARRIER = Bug("missing barrier", "kernels.cuh", "  __syncthreads();\n", "")
SEGMENT = Bug("off-by-one segment", "registers.cuh", "s.start[at + 1] <= i", "s.start[at + 1] < i")
WIDTH = Bug(
    "wrong shuffle width", "registers.cuh", "x < BLOCK / VECTOR;", "x < BLOCK / VECTOR * 2;"
)
COUNTER = Bug(
    "a random counter that starts anew in each shard",
    "kernels.cuh",
    "(a.segments.first[s] + i - a.segments.start[s])",
    "i",
)
STORE = Bug(
    "missing guard of the tail's stores",
    "kernels.cuh",
    "if (!live) return;",
    "if (group < 0) return;",
)
LOAD = Bug(
    "missing guard of the tail's loads", "kernels.cuh", "inside ? at : chunk * CHUNK;", "at;"
)
EXIT = Bug(
    "lanes that leave before a shuffle",
    "kernels.cuh",
    "  MainOf<MAIN> main;\n  MomentOf<FIRST, false> first;",
    "  if (!inside) return;\n  MainOf<MAIN> main;\n  MomentOf<FIRST, false> first;",
)
ALIGNMENT = Bug("misaligned vector", "cuda.cu", "((uintptr_t)p & 15) == 0", "p || true")


def run(library: Path, cpu: Library, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Compare a library with the CPU library in a process of its own."""
    command = [sys.executable, "-m", "tests.cuda_ops.worker", str(library), str(cpu.path), *words]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_a_bug_nothing_is_found(built: Path, cpu: Library) -> None:
    assert compare(cpu, Library(emulator(built, fewer=True)), VARIANTS, steps=2) == {}


@pytest.mark.parametrize("bug", [BARRIER, SEGMENT, WIDTH, COUNTER], ids=lambda bug: bug.name)
def test_a_wrong_result_is_found(bug: Bug, built: Path, cpu: Library) -> None:
    wrong = Library(emulator(built, bugs=[bug], fewer=True, flags=("-O0",)))
    assert compare(cpu, wrong, VARIANTS, steps=2) != {}


def test_a_store_beyond_the_shard_is_found(built: Path) -> None:
    bugs = [STORE, LOAD]
    guarded = Guarded()
    guarded.step(Library(emulator(built, bugs=bugs, fewer=True, flags=("-O0",))), VARIANTS[1])
    assert not guarded.intact()


def test_lanes_that_leave_early_are_a_deadlock(built: Path, cpu: Library) -> None:
    done = run(emulator(built, bugs=[EXIT], fewer=True, flags=("-O0",)), cpu)
    assert done.returncode < 0
    assert "deadlock" in done.stderr


def test_a_misaligned_vector_is_refused_and_found(built: Path, cpu: Library) -> None:
    refused = run(emulator(built, fewer=True), cpu, "misaligned")
    assert "does not start at a multiple of 16 bytes" in refused.stderr
    found = run(emulator(built, bugs=[ALIGNMENT], fewer=True, flags=("-O0",)), cpu, "misaligned")
    assert found.returncode < 0
    assert "misaligned access of 16 bytes" in found.stderr
