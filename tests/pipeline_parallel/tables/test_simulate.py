"""Times by hand, and that a table takes as long with its messages as without."""

from __future__ import annotations

import math
from typing import Any

import pytest

from goose_strategy.errors import ConfigError, ScheduleError
from goose_strategy.pipeline_parallel.schedule import Action, gpipe, one_f_one_b
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE, finish, make_schedule
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.insert import add_recompute, add_tie
from goose_strategy.pipeline_parallel.tables.simulate import Costs, draw, simulate
from tests.pipeline_parallel.tables.torch_tables import rows_of


def test_one_microbatch_by_hand() -> None:
    costs = Costs((2.0, 3.0), (4.0, 5.0), (1.0, 7.0), latency=0.5)
    result = simulate(gpipe(2, 1), costs)
    first, second = result.timeline
    assert [(str(s.action), s.start, s.end) for s in first] == [("0F0", 0, 2), ("0B0", 18, 23)]
    assert [(str(s.action), s.start, s.end) for s in second] == [
        ("1F0", 2.5, 5.5),
        ("1B0", 5.5, 17.5),
    ]
    assert result.makespan == 23
    assert result.busy == (7, 15)
    assert result.idle == (16, 8)
    assert result.bubble == 1 - 22 / 46


def test_a_weight_gradient_holds_nobody_up() -> None:
    costs = Costs.even(2, backward_weight=10.0)
    split = simulate(rows_of("0F0 0I0 0W0", "1F0 1I0 1W0"), costs)
    assert split.makespan == 14
    assert simulate(gpipe(2, 1), costs).makespan == 24


def test_no_latency_between_stages_of_a_rank() -> None:
    table = rows_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    result = simulate(table, Costs.even(4, latency=0.25), Chunks(2, 2, "v"))
    assert result.makespan == 12 + 4 * 0.25


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 8)])
def test_the_textbook_formula(ranks: int, microbatches: int) -> None:
    for make in (gpipe, one_f_one_b):
        result = simulate(make(ranks, microbatches), Costs.even(ranks, forward=2.0))
        assert result.makespan == (microbatches + ranks - 1) * 4
        assert math.isclose(result.bubble, (ranks - 1) / (microbatches + ranks - 1))


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_messages_change_no_time(name: str) -> None:
    schedule = make_schedule(name, 4, 6)
    costs = Costs.even(schedule.chunks.stages, backward_input=1.2, latency=0.05)
    bare = simulate(schedule.table, costs, schedule.chunks)
    assert simulate(finish(schedule), costs, schedule.chunks) == bare


def test_a_recompute_runs_while_its_gradient_travels() -> None:
    table = add_recompute(one_f_one_b(2, 2))
    costs = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), recompute=(1.0, 1.0))
    # 0R0 runs from 2 to 3, and its gradient is there at 4; 0R1 starts with 0B0 ended, at 6.
    assert simulate(table, costs).makespan == 9
    slow = Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), recompute=(5.0, 5.0))
    # 0R0 runs from 2 to 7.
    assert simulate(table, slow).makespan == 16


def test_a_tie_ends_after_both_have_come_to_it() -> None:
    costs = Costs((1.0,) * 2, (1.0,) * 2, (1.0,) * 2, tie=3.0)
    assert simulate(add_tie(gpipe(2, 1)), costs).makespan == 6 + 3


def test_a_table_that_waits_for_itself_is_named() -> None:
    with pytest.raises(ScheduleError, match="The table deadlocks: 0B0, 1F0 wait for one another"):
        simulate(rows_of("0B0 0F0", "1F0 1B0"), Costs.even(2))


def test_wrong_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match="costs of 3 stages do not fit a schedule of 2"):
        simulate(gpipe(2, 1), Costs.even(3))
    with pytest.raises(ConfigError, match=r"backward_weight=\(1.0,\) has 1 stages, forward has 2"):
        Costs((1.0, 1.0), (1.0, 1.0), (1.0,))
    for wrong in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="must be at least 0"):
            Costs.even(2, latency=wrong)


def test_a_picture_names_stages_where_a_rank_has_several() -> None:
    table = rows_of("0F0 2F0 2B0 0B0", "1F0 1B0")
    with pytest.raises(ConfigError, match="costs of 2 stages"):
        simulate(table, Costs.even(2), Chunks(2, 2))
    table = rows_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    assert draw(table, Chunks(2, 2, "v")) == (
        "0F0 ..  ..  3F0 3B0 ..  ..  0B0\n..  1F0 2F0 ..  ..  2B0 1B0 .."
    )
    assert draw((tuple(map(Action.parse, ["0F10", "0B10"])),)) == "F10 B10"


@pytest.mark.parametrize("name", ["inputs", "resident"])
def test_memory_is_given_for_every_stage(name: str) -> None:
    more: dict[str, Any] = {name: (1.0,)}
    with pytest.raises(ConfigError, match=rf"{name}=\(1\.0,\) has 1 stages, forward has 2"):
        Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), **more)
    more = {name: (1.0, -1.0)}
    with pytest.raises(ConfigError, match=r"cost=-1\.0 must be at least 0"):
        Costs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), **more)
