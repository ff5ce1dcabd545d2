"""Steps of ranks that share a card: every tensor goes through the host, however late or early.

The CPU stands in for the card (``harness/streams``). A step must have the bits of ranks on CPUs,
whose transport the copies surround, and the numbers of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch

from goose_strategy.mesh.lane import LANES
from goose_strategy.mesh.mesh import ParallelMesh
from tests.comm.plants import PLANTS
from tests.harness.streams import FakeLane, Pace
from tests.harness.world import RankFailure
from tests.parity.grid import Case, Plant, Run, assert_parity, run_case


@contextmanager
def _through_the_host(mesh: ParallelMesh, pace: Pace, plant: str = "nothing") -> Iterator[None]:
    groups = [mesh.tp, mesh.dp, mesh.pp_forward, mesh.pp_backward, mesh.tie, mesh.model, mesh.world]
    lane = FakeLane(pace)
    LANES.update({group: lane for group in groups if group is not None})
    try:
        with PLANTS[plant](lane):
            yield
        assert lane.copies > 0
    finally:
        LANES.clear()


def late(mesh: ParallelMesh) -> AbstractContextManager[None]:
    """Copies happen when somebody waits for them."""
    return _through_the_host(mesh, "late")


def early(mesh: ParallelMesh) -> AbstractContextManager[None]:
    """Copies happen at once."""
    return _through_the_host(mesh, "early")


def host_early(mesh: ParallelMesh) -> AbstractContextManager[None]:
    """The host reads what has not come down."""
    return _through_the_host(mesh, "late", "the host does not wait for the copy down")


def computation_early(mesh: ParallelMesh) -> AbstractContextManager[None]:
    """The computation reads what has not come up."""
    return _through_the_host(mesh, "late", "the computation does not wait for the copy up")


CASES = [
    Case(tp=2, pp=2, steps=3, tied=True, max_norm=0.5),
    Case(pp=2, dp=2, steps=3, accumulate=2, max_norm=0.5),
    Case(pp=2, steps=2, schedule="Interleaved1F1B", microbatches=4),
    Case(dp=2, steps=2, dtype=torch.float32, zero=(("wire", "bf16"),)),
]

NOTICED = r"differ|hold different values|number 0|tensors|freed before the copy was over"


@cache
def _on_cpus(case: Case) -> Run:
    return run_case(case)


def _same_bits(one: Run, other: Run) -> None:
    assert one.losses == other.losses
    assert one.norms == other.norms
    every = [*one.gradients, one.parameters], [*other.gradients, other.parameters]
    for mine, theirs in zip(*every, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("plant", [late, early])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_of_ranks_without_a_card(case: Case, plant: Plant) -> None:
    _same_bits(run_case(case, plant=plant), _on_cpus(case))


def test_the_numbers_of_one_process() -> None:
    assert_parity(CASES[0], plant=late)


@pytest.mark.parametrize("plant", [host_early, computation_early])
@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_a_missing_wait_is_noticed(case: Case, plant: Plant) -> None:
    # Other numbers, or a copy from or to memory that is gone.
    with pytest.raises((AssertionError, RankFailure), match=NOTICED):
        assert_parity(replace(case, steps=1, accumulate=1), plant=plant)
