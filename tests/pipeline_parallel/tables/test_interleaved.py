"""Schedules over a loop of stages, as pictures and in what they hold."""

from __future__ import annotations

from textwrap import dedent

import pytest

from goose_strategy.pipeline_parallel.schedule import one_f_one_b
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.interleaved import (
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    zb_h1,
)
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations, peak_by_stage
from goose_strategy.pipeline_parallel.tables.simulate import Costs, draw, simulate


def staircase(text: str) -> str:
    return dedent(text).strip("\n")


def test_interleaved_1f1b() -> None:
    assert draw(interleaved_1f1b(2, 2, 4), Chunks(2, 2)) == staircase(
        """
        0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ..  2B2 ..  2B3 0B2 0B3
        ..  1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ..
        """
    )


def test_looped_bfs_keeps_the_order_of_the_microbatches() -> None:
    assert draw(looped_bfs(2, 2, 4), Chunks(2, 2)) == staircase(
        """
        0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 ..  ..  2B0 2B1 2B2 2B3 0B0 0B1 0B2 0B3
        ..  1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3 1B0 1B1 1B2 1B3 ..
        """
    )


def test_zb_h1() -> None:
    assert draw(zb_h1(3, 4)) == staircase(
        """
        F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
        .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("per_rank", [2, 3, 4])
def test_the_bubble_shrinks_by_the_number_of_chunks(ranks: int, per_rank: int) -> None:
    """Also where the microbatches do not divide into rounds, which torch refuses."""
    for microbatches in range(ranks, 4 * ranks + 1):
        chunks = Chunks(ranks, per_rank)
        costs = Costs.even(chunks.stages)
        # In units of a chunk's action: F, I and W of all, and the start and the end of the line.
        work = 3 * per_rank * microbatches
        table = interleaved_1f1b(ranks, per_rank, microbatches)
        assert simulate(table, costs, chunks).makespan == work + 3 * (ranks - 1)
        table = interleaved_zero_bubble(ranks, per_rank, microbatches)
        assert simulate(table, costs, chunks).makespan == work + ranks - 1
        table = looped_bfs(ranks, per_rank, microbatches)
        assert simulate(table, costs, chunks).makespan == work + 3 * (ranks - 1)


def test_what_each_rank_holds() -> None:
    assert peak_activations(interleaved_1f1b(4, 2, 8)) == (11, 9, 7, 5)
    assert peak_activations(interleaved_zero_bubble(4, 2, 8)) == (8, 8, 8, 8)
    assert peak_activations(looped_bfs(4, 2, 8)) == (16, 16, 16, 16)
    assert peak_activations(zb_h1(4, 8)) == (4, 4, 4, 4)
    assert max(peak_activations(one_f_one_b(4, 8))) == 4
    assert peak_by_stage(looped_bfs(2, 2, 3)) == {0: 3, 1: 3, 2: 3, 3: 3}


def test_fewer_microbatches_than_ranks() -> None:
    for microbatches in (1, 2, 3):
        table = interleaved_1f1b(4, 2, microbatches)
        makespan = simulate(table, Costs.even(8), Chunks(4, 2)).makespan
        # One microbatch passes all stages down and up; the others follow.
        assert makespan == 8 * 3 + 3 * (microbatches - 1)
