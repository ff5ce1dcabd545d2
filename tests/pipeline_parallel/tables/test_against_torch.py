"""The same order of work as torch's tables, or one that takes no longer and holds no more."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining import schedules

from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table, one_f_one_b
from goose_strategy.pipeline_parallel.tables.catalogue import (
    CATALOGUE,
    finish,
    make_schedule,
)
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations
from goose_strategy.pipeline_parallel.tables.simulate import Costs, simulate
from tests.pipeline_parallel.tables.torch_tables import torch_table

MICROBATCHES = (4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
SAME = {
    "Interleaved1F1B": (2, 3, 4),
    "InterleavedZeroBubble": (2, 3, 4),
    "ZBVZeroBubble": (2,),
    "DualPipeV": (2,),
}


def figures(table: Table, chunks: Chunks) -> list[float]:
    even = Costs.even(chunks.stages)
    real = Costs.even(
        chunks.stages, forward=1.0, backward_input=1.2, backward_weight=0.8, latency=0.05
    )
    return [simulate(table, costs, chunks).makespan for costs in (even, real)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", list(SAME))
def test_the_same_order(name: str, ranks: int) -> None:
    compared = 0
    for per_rank in SAME[name]:
        for microbatches in MICROBATCHES:
            ours = make_schedule(name, ranks, microbatches, per_rank=per_rank).table
            try:
                theirs = torch_table(f"Schedule{name}", ranks, per_rank, microbatches)
            except ValueError:
                continue  # torch takes fewer numbers of microbatches.
            assert ours == theirs
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_gpipe_and_zb_h1_are_the_same(ranks: int, microbatches: int) -> None:
    ours = make_schedule("GPipe", ranks, microbatches).table
    assert ours == torch_table("ScheduleGPipe", ranks, 1, microbatches)
    try:
        theirs = torch_table("ScheduleInterleavedZeroBubble", ranks, 1, microbatches)
    except ValueError:
        return
    assert make_schedule("ZBH1", ranks, microbatches).table == theirs


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("microbatches", MICROBATCHES)
def test_breadth_first_takes_the_backwards_in_order_in_the_same_time(
    ranks: int, microbatches: int
) -> None:
    for per_rank in (2, 3):
        chunks = Chunks(ranks, per_rank)
        ours = make_schedule("LoopedBFS", ranks, microbatches, per_rank=per_rank).table
        theirs = torch_table("ScheduleLoopedBFS", ranks, per_rank, microbatches)
        for mine, its in zip(ours, theirs, strict=True):
            mirrored = [
                a if a.kind is Kind.FORWARD else a._replace(microbatch=microbatches - 1 - a[2])
                for a in its
            ]
            assert list(mine) == mirrored
        ours_takes, theirs_takes = figures(ours, chunks), figures(theirs, chunks)
        assert all(a <= b + 1e-9 for a, b in zip(ours_takes, theirs_takes, strict=True))
        assert peak_activations(ours) == peak_activations(theirs)


@pytest.mark.parametrize("name", list(CATALOGUE))
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 7), (8, 16)])
def test_torch_can_execute_our_messages(name: str, ranks: int, microbatches: int) -> None:
    """torch's own simulation of tables with messages ends, with every action executed."""
    schedule = make_schedule(name, ranks, microbatches)
    table = finish(schedule)
    theirs = {
        rank: [schedules._Action.from_str(str(action)) for action in row]
        for rank, row in enumerate(table)
    }
    done = schedules._simulate_comms_compute(
        theirs, schedule.chunks.rank_of, schedule.chunks.stages
    )
    for rank, row in enumerate(table):
        assert [str(action) for action in done[rank] if action is not None] == list(map(str, row))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_1f1b_without_torchs_errors(ranks: int) -> None:
    """torch's table for 1F1B numbers the last rank's forwards from 1, and its interleaved one
    runs twice as many forwards ahead as one stage per rank needs."""
    for microbatches in (ranks, 2 * ranks, 4 * ranks):
        ours = one_f_one_b(ranks, microbatches)
        theirs = torch_table("Schedule1F1B", ranks, 1, microbatches)
        assert ours[:-1] == theirs[:-1]
        assert theirs[-1][0] == Action(ranks - 1, Kind.FORWARD, 1)
        interleaved = torch_table("ScheduleInterleaved1F1B", ranks, 1, microbatches)
        assert figures(ours, Chunks(ranks))[0] == figures(interleaved, Chunks(ranks))[0]
        assert max(peak_activations(ours)) == ranks
        assert max(peak_activations(interleaved)) == min(2 * ranks - 1, microbatches)
