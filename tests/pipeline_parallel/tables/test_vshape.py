"""Schedules over a V of stages."""

from __future__ import annotations

from itertools import pairwise
from textwrap import dedent

import pytest

from goose_strategy.pipeline_parallel.schedule import Action, Kind
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations
from goose_strategy.pipeline_parallel.tables.simulate import Costs, draw, simulate
from goose_strategy.pipeline_parallel.tables.vshape import dualpipev, zbv


def staircase(text: str) -> str:
    return dedent(text).strip("\n")


def test_zbv() -> None:
    assert draw(zbv(2, 3), Chunks(2, 2, "v")) == staircase(
        """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 ..
        ..  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
        """
    )


def test_dualpipev() -> None:
    table, overlapped = dualpipev(2, 4)
    assert draw(table, Chunks(2, 2, "v")) == staircase(
        """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        ..  1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
        """
    )
    assert sorted(map(str, overlapped)) == ["0F3", "1F3", "2F2", "2F3", "3F2", "3F3"]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_zbv_has_no_idle_time_after_the_start(ranks: int) -> None:
    for microbatches in (2 * ranks, 4 * ranks):
        result = simulate(zbv(ranks, microbatches), Costs.even(2 * ranks), Chunks(ranks, 2, "v"))
        assert result.makespan == 6 * microbatches + ranks - 1
        assert max(peak_activations(zbv(ranks, microbatches))) == 2 * ranks


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_dualpipev_holds_one_chunk_more(ranks: int) -> None:
    table, _ = dualpipev(ranks, 4 * ranks)
    assert max(peak_activations(table)) <= 2 * ranks + 1
    result = simulate(table, Costs.even(2 * ranks), Chunks(ranks, 2, "v"))
    assert result.makespan == 6 * 4 * ranks + ranks - 1


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 11])
def test_an_overlapped_forward_stands_before_a_backward_of_the_other_stage(
    microbatches: int,
) -> None:
    table, overlapped = dualpipev(4, microbatches)
    found: set[Action] = set()
    for row in table:
        for one, two in pairwise(row):
            if one in overlapped:
                assert one.kind is Kind.FORWARD and two.kind is Kind.BACKWARD
                assert one.stage != two.stage
                found.add(one)
    assert found == overlapped
