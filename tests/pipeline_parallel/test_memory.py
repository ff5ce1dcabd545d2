"""Memory by stage, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from goose_strategy.pipeline_parallel.balance import Work
from goose_strategy.pipeline_parallel.memory import Memory
from goose_strategy.pipeline_parallel.profile import Cost, Profile
from goose_strategy.pipeline_parallel.tables.catalogue import make_schedule
from goose_strategy.pipeline_parallel.tables.insert import add_recompute
from goose_strategy.pipeline_parallel.tables.peaks import peak_memory

PROFILE = Profile(
    shape=(1, 8),
    before=Cost(saved=5),
    layers=tuple(Cost(saved=saved) for saved in (100, 200, 100, 100)),
    after=Cost(saved=70),
    hidden=10,
    shared=3,
)
RESIDENT = Work(1000, (50, 60, 50, 50), 2000)
MEMORY = Memory(RESIDENT, PROFILE)
BOUNDS = (0, 2, 4)


def test_what_stays_and_what_a_microbatch_leaves() -> None:
    assert MEMORY.stays(BOUNDS) == [1110, 2100]
    assert MEMORY.activations(BOUNDS) == [3 + 5 + 300, 3 + 200 + 70]
    assert MEMORY.inputs(3) == [0, 10, 10]


def test_layers_that_are_computed_again_keep_their_inputs() -> None:
    again = replace(MEMORY, recompute="layer")
    assert again.activations(BOUNDS) == [3 + 5 + 20, 3 + 20 + 70]
    # And the layer that is computed just now.
    assert again.stays(BOUNDS) == [1110 + 200, 2100 + 100]


def test_a_stage_holds_as_many_microbatches_as_its_schedule_says() -> None:
    load = MEMORY.load(make_schedule("1F1B", 2, 4))
    assert load.by_stage(BOUNDS) == [1110 + 2 * 308, 2100 + 273]
    load = MEMORY.load(make_schedule("GPipe", 2, 4))
    assert load.by_stage(BOUNDS) == [1110 + 4 * 308, 2100 + 4 * 273]


def test_whole_stages_that_are_computed_again_hold_inputs_and_one_microbatch() -> None:
    schedule = make_schedule("GPipe", 2, 4)
    schedule = schedule.with_table(add_recompute(schedule.table))
    load = replace(MEMORY, recompute="full").load(schedule)
    # The last stage holds the inputs of four; one of them is taken when its R begins.
    assert load.by_stage(BOUNDS) == [1110 + 308, 2100 + 273 + 4 * 10]


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBH1", "ZBVZeroBubble", "VMin"])
def test_no_rank_holds_more_than_it_is_cut_for(name: str) -> None:
    schedule = make_schedule(name, 2, 6)
    bounds = (*range(schedule.chunks.stages), 4)
    activations = MEMORY.activations(bounds)
    load = MEMORY.load(schedule)
    peaks = peak_memory(schedule.table, activations)
    for rank, most in enumerate(load.by_rank(bounds, schedule.chunks)):
        stays = sum(MEMORY.stays(bounds)[s] for s in schedule.chunks.stages_of(rank))
        assert most >= stays + peaks[rank]
        if schedule.chunks.per_rank == 1:
            assert most == stays + peaks[rank]
