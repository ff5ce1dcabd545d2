"""Schedules whose weight gradients wait for all stages: complete, free of deadlock, short."""

from __future__ import annotations

import pytest

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.program import chunks_of, program
from goose_strategy.pipeline_parallel.schedule import Action, Kind
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE, finish, make_schedule
from goose_strategy.pipeline_parallel.tables.checks import check_messages, check_schedule
from goose_strategy.pipeline_parallel.tables.chunks import Chunks, Schedule
from goose_strategy.pipeline_parallel.tables.lowering import lower
from goose_strategy.pipeline_parallel.tables.norms import Norms, split_in_place, wait_for_norms
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations
from goose_strategy.pipeline_parallel.tables.simulate import Costs, simulate


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_schedule_runs_to_its_end(name: str) -> None:
    """With rendezvous sends, and a ``W`` that waits for every ``I`` of its microbatch."""
    for ranks in (1, 2, 3, 4, 8):
        for microbatches in (1, 2, 5, 9):
            for recompute in (False, True):
                for norms in (Norms(extra=0), Norms(), Norms(across_stages=False)):
                    chunks = chunks_of(name, ranks)
                    table = program(name, chunks, microbatches, recompute=recompute, norms=norms)
                    kinds = {action.kind for row in table for action in row}
                    assert Kind.BACKWARD not in kinds
                    assert Kind.WEIGHT in kinds


@pytest.mark.parametrize("name", CATALOGUE)
def test_forwards_and_input_gradients_keep_their_order(name: str) -> None:
    schedule = make_schedule(name, 4, 6)
    made = wait_for_norms(schedule, extra=1)
    check_schedule(made)
    for before, after in zip(schedule.table, made.table, strict=True):
        order = [(a.stage, a.microbatch, a.kind is Kind.FORWARD) for a in before if a.kind != "W"]
        kept = [(a.stage, a.microbatch, a.kind is Kind.FORWARD) for a in after if a.kind != "W"]
        assert kept == order


def test_one_more_in_flight_costs_no_time() -> None:
    """As the plain zero-bubble schedules take, in units of one action."""
    for name, longest in (("ZBH1", 51), ("1F1B", 51), ("ZBVZeroBubble", 99)):
        made = wait_for_norms(make_schedule(name, 4, 16), extra=1)
        costs = Costs.even(made.chunks.stages)
        assert simulate(made.table, costs, made.chunks).makespan <= longest


@pytest.mark.parametrize("name", ["1F1B", "ZBH1"])
def test_no_more_is_held_than_was_allowed(name: str) -> None:
    for extra in (0, 1, 2):
        made = wait_for_norms(make_schedule(name, 4, 16), extra=extra)
        assert max(peak_activations(made.table)) <= 4 + extra


def test_a_rank_alone_holds_one_microbatch() -> None:
    made = wait_for_norms(make_schedule("1F1B", 1, 3), extra=4)
    assert [str(action) for action in made.table[0]] == [
        *("0F0", "0I0", "0W0"),
        *("0F1", "0I1", "0W1"),
        *("0F2", "0I2", "0W2"),
    ]


def test_splitting_in_place_keeps_everything_where_it_is() -> None:
    made = split_in_place(make_schedule("1F1B", 2, 2))
    assert [str(action) for action in made.table[1]] == ["1F0", "1I0", "1W0", "1F1", "1I1", "1W1"]


def test_a_w_that_waits_for_a_later_i_of_its_rank_is_found() -> None:
    """In place, the first stage of a V would wait for itself."""
    schedule = make_schedule("ZBVZeroBubble", 2, 4)
    split = split_in_place(schedule)
    rows = [list(row) for row in split.table]
    for row in rows:
        weights = [a for a in row if a.kind is Kind.WEIGHT]
        for weight in weights:
            row.remove(weight)
            row.insert(row.index(weight._replace(kind=Kind.INPUT)) + 1, weight)
    table = lower(tuple(map(tuple, rows)), split.chunks)
    check_messages(table, split.chunks)
    with pytest.raises(ScheduleError, match="deadlocks"):
        check_messages(table, split.chunks, norms=True)


def test_a_table_that_cannot_be_executed_is_refused() -> None:
    chunks = Chunks(2)
    row = tuple(Action(0, kind, 0) for kind in (Kind.BACKWARD, Kind.FORWARD))
    other = tuple(Action(1, kind, 0) for kind in (Kind.FORWARD, Kind.BACKWARD))
    with pytest.raises(ScheduleError, match="deadlocks"):
        wait_for_norms(Schedule("wrong", chunks, 1, (row, other)), extra=0)


def test_evaluation_has_no_norms() -> None:
    schedule = make_schedule("1F1B", 2, 2, train=False)
    assert finish(schedule, train=False, norms=Norms()) == finish(schedule, train=False)
