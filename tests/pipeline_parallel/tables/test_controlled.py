"""V-Half and V-Min keep the paper's bounds, and stay near its idle time."""

from __future__ import annotations

import pytest

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.controlled import _controlled, _layout, v_half, v_min
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations
from goose_strategy.pipeline_parallel.tables.simulate import Costs, simulate


@pytest.mark.parametrize("ranks", range(1, 17))
def test_the_bounds_of_the_paper_are_kept_and_used(ranks: int) -> None:
    """In full microbatches, (p + 2) // 2 and (p + 4) // 3; a chunk is half of one."""
    for make, bound in ((v_half, (ranks + 2) // 2), (v_min, (ranks + 4) // 3)):
        peaks = [max(peak_activations(make(ranks, m))) for m in (1, 2, 5, 2 * ranks, 3 * ranks + 1)]
        assert max(peaks) <= 2 * bound
        assert peaks[-1] == 2 * bound


# From the authors' own implementation (unit costs, no latency).
PUBLISHED = {
    ("half", 2): {4: 4.0, 8: 2.0, 16: 1.0, 32: 0.5},
    ("half", 3): {4: 17.2, 8: 9.4, 16: 5.0, 32: 2.5},
    ("half", 4): {4: 29.4, 8: 9.4, 16: 5.0, 32: 2.5},
    ("half", 5): {4: 36.8, 8: 18.6, 16: 10.3, 32: 5.4},
    ("half", 8): {4: 50.0, 8: 26.2, 16: 15.0, 32: 8.1},
    ("min", 2): {4: 11.1, 8: 5.9, 16: 3.0, 32: 1.5},
    ("min", 4): {4: 31.4, 8: 18.6, 16: 10.3, 32: 5.4},
    ("min", 5): {4: 38.5, 8: 23.8, 16: 13.5, 32: 7.2},
    ("min", 6): {4: 44.2, 8: 26.2, 16: 15.0, 32: 8.1},
    ("min", 8): {4: 52.9, 8: 36.0, 16: 22.0, 32: 12.3},
}


@pytest.mark.parametrize(("name", "ranks"), list(PUBLISHED))
def test_the_bubble_is_not_larger_than_the_authors(name: str, ranks: int) -> None:
    make = {"half": v_half, "min": v_min}[name]
    for microbatches, theirs in PUBLISHED[name, ranks].items():
        table = make(ranks, microbatches)
        result = simulate(table, Costs.even(2 * ranks), Chunks(ranks, 2, "v"))
        assert 100 * result.bubble <= theirs + 0.05


def test_a_bound_that_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no layout for ranks=4 holds at most 2 chunks"):
        _controlled(4, 8, pace=1, bound=2)


@pytest.mark.parametrize("ranks", range(1, 13))
@pytest.mark.parametrize("pace", [1, 2])
def test_repeated_layouts_never_meet_in_a_slot(ranks: int, pace: int) -> None:
    for offsets in _layout(ranks, pace, 2 * ranks + 2):
        slots = [offset + 6 * mb for offset in offsets for mb in range(ranks + 6)]
        assert len(set(slots)) == len(slots)


def test_a_looser_bound_holds_more_and_takes_less_time() -> None:
    costs, chunks = Costs.even(16), Chunks(8, 2, "v")
    tight, loose = v_min(8, 16), _controlled(8, 16, pace=1, bound=16)
    assert max(peak_activations(tight)) == 8 < max(peak_activations(loose)) <= 16
    assert simulate(loose, costs, chunks).makespan < simulate(tight, costs, chunks).makespan
