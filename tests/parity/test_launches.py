"""All members of a communicator launch the same, in the same order, in whole training runs.

gloo forgives much of what hangs on NCCL, so launches are compared, not outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest
import torch

from goose_strategy.comm.recorder import Launch, Recorder, mismatches
from goose_strategy.mesh.mesh import ParallelMesh
from tests.parity.grid import FIRST_HALF, Case, assert_parity, run_case

MESSAGES = ("send", "receive")

CUBES = [
    Case(
        "qwen3",
        tp=2,
        pp=2,
        dp=2,
        schedule=schedule,
        tied=tied,
        frozen=frozen,
        max_norm=0.5,
        accumulate=2,
        steps=2,
    )
    for schedule, (tied, frozen) in product(("GPipe", "1F1B"), ((True, ()), (False, FIRST_HALF)))
]
LAST_RANK = 7


@cache
def recorded(case: Case) -> list[Recorder]:
    """Return what every rank launched."""
    return run_case(case).recorders


def members(group: str) -> list[int]:
    """Return the ranks of a communicator from its label, ``"goose_tp[0, 1]"``."""
    return [int(rank) for rank in group[group.index("[") + 1 : -1].split(",")]


def collectives(recorder: Recorder) -> Recorder:
    """Return a record without messages, of which each member of a group sees its own."""
    kept = Recorder()
    kept.launches = [launch for launch in recorder.launches if launch.op not in MESSAGES]
    return kept


@pytest.mark.parametrize("case", CUBES, ids=str)
def test_every_communicator_carries_the_same_on_all_members(case: Case) -> None:
    ranks = recorded(case)
    assert mismatches(dict(enumerate(ranks))) == []
    labels = {launch.group for recorder in ranks for launch in recorder.launches}
    for group in labels:
        hashes = {collectives(ranks[rank]).hash(group) for rank in members(group)}
        assert len(hashes) == 1, f"{group}: the members' launches differ"


@pytest.mark.parametrize("case", CUBES, ids=str)
def test_every_kind_of_communicator_is_used(case: Case) -> None:
    ranks = recorded(case)
    used = {launch.group.split("[")[0] for recorder in ranks for launch in recorder.launches}
    expected = {"goose_tp", "goose_dp", "goose_pp_forward", "goose_model_control"}
    expected |= {"goose_tie"} if case.tied else set()
    assert expected <= used


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_stage_sends_each_microbatch_once_each_way(schedule: str) -> None:
    case = replace(CUBES[0], schedule=schedule)
    calls = case.steps * case.accumulate
    hidden = 32
    for rank, recorder in enumerate(recorded(case)):
        sent = [
            one for one in recorder.launches if one.op == "send" and one.shape[-1:] == (hidden,)
        ]
        assert len(sent) == calls * 3, f"rank {rank}"
        # Four rows of a replica in three microbatches: 2, 1, 1.
        assert {launch.shape[0] for launch in sent} == {1, 2}
        assert {launch.peer for launch in sent} == {(rank + 4) % 8}


def extra_collective(launches: list[Launch]) -> None:
    at = next(i for i, one in enumerate(launches) if one.group.startswith("goose_dp"))
    launches.insert(at, launches[at])


def missing_collective(launches: list[Launch]) -> None:
    at = next(i for i, one in enumerate(launches) if one.group.startswith("goose_tp"))
    del launches[at]


def swapped_collectives(launches: list[Launch]) -> None:
    places = [i for i, one in enumerate(launches) if one.group.startswith("goose_dp")]
    first, second = next((a, b) for a, b in pairwise(places) if launches[a] != launches[b])
    launches[first], launches[second] = launches[second], launches[first]


def other_type(launches: list[Launch]) -> None:
    at = next(i for i, one in enumerate(launches) if one.group.startswith("goose_tie"))
    launches[at] = launches[at]._replace(dtype=torch.float32)


def extra_message(launches: list[Launch]) -> None:
    launches.append(next(one for one in launches if one.op == "send"))


@pytest.mark.parametrize(
    "tamper",
    [extra_collective, missing_collective, swapped_collectives, other_type, extra_message],
    ids=lambda tamper: tamper.__name__,
)
def test_a_difference_on_one_rank_is_found(tamper: Callable[[list[Launch]], None]) -> None:
    ranks = deepcopy(recorded(CUBES[2]))
    tamper(ranks[LAST_RANK].launches)
    found = mismatches(dict(enumerate(ranks)))
    assert len(found) == 1
    assert f"rank {LAST_RANK}" in found[0]


@contextmanager
def one_more_on_the_last_rank(mesh: ParallelMesh) -> Iterator[None]:
    """Let the last rank's recorder see its first launch on dp twice."""
    note, seen = Recorder.note, set[str]()

    def twice(recorder: Recorder, group: torch.distributed.ProcessGroup, *args, **kw) -> None:
        note(recorder, group, *args, **kw)
        if mesh.rank == LAST_RANK and group is mesh.dp and not seen:
            seen.add("dp")
            note(recorder, group, *args, **kw)

    Recorder.note = twice
    try:
        yield
    finally:
        Recorder.note = note


def test_every_parity_test_compares_launches() -> None:
    case = replace(CUBES[0], steps=1)
    assert_parity(case)
    with pytest.raises(AssertionError, match=r"^launches: goose_dp.*rank 7"):
        assert_parity(case, plant=one_more_on_the_last_rank)
