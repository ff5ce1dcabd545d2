"""Schedules as the pictures that textbooks draw."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import pytest

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.schedule import (
    Action,
    Kind,
    Table,
    gpipe,
    one_f_one_b,
)
from goose_strategy.pipeline_parallel.tables.checks import check_table
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations
from goose_strategy.pipeline_parallel.tables.simulate import draw


def staircase(text: str) -> str:
    return dedent(text).strip("\n")


def test_gpipe() -> None:
    assert draw(gpipe(4, 4)) == staircase(
        """
        F0 F1 F2 F3 .. .. .. .. .. .. B0 B1 B2 B3
        .. F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3 ..
        .. .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 .. ..
        .. .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. .. ..
        """
    )


def test_one_f_one_b() -> None:
    assert draw(one_f_one_b(4, 6)) == staircase(
        """
        F0 F1 F2 F3 .. .. .. B0 F4 B1 F5 B2 .. B3 .. B4 .. B5
        .. F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5 ..
        .. .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 F5 B4 .. B5 .. ..
        .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .. .. ..
        """
    )


def test_one_f_one_b_with_fewer_microbatches_than_stages() -> None:
    assert draw(one_f_one_b(4, 2)) == staircase(
        """
        F0 F1 .. .. .. .. .. B0 .. B1
        .. F0 F1 .. .. .. B0 .. B1 ..
        .. .. F0 F1 .. B0 .. B1 .. ..
        .. .. .. F0 B0 F1 B1 .. .. ..
        """
    )


def test_one_microbatch_is_the_same_everywhere() -> None:
    assert one_f_one_b(3, 1) == gpipe(3, 1)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 16])
def test_both_schedules_are_complete_and_reach_their_bound(
    make: Callable[[int, int], Table], stages: int, microbatches: int
) -> None:
    table = make(stages, microbatches)
    check_table(table, microbatches)
    columns = len(draw(table).split("\n")[0].split())
    assert columns == 2 * (microbatches + stages - 1)


def test_one_f_one_b_holds_as_many_activations_as_stages_follow() -> None:
    assert peak_activations(one_f_one_b(4, 16)) == (4, 3, 2, 1)
    assert peak_activations(one_f_one_b(4, 2)) == (2, 2, 2, 1)
    assert peak_activations(gpipe(4, 16)) == (16, 16, 16, 16)


def test_actions_are_written_as_torch_writes_them() -> None:
    from torch.distributed.pipelining import schedules

    for kind in Kind:
        text = str(Action(2, kind, 13))
        assert Action.parse(text) == Action(2, kind, 13)
        if kind in (Kind.RECOMPUTE, Kind.TIE):
            continue  # torch has neither.
        theirs = schedules._Action.from_str(text)
        assert str(theirs) == text


@pytest.mark.parametrize("text", ["F0", "2F", "2X0", "2F0 ", "-1F0"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not of the form <stage><kind><microbatch>"):
        Action.parse(text)
