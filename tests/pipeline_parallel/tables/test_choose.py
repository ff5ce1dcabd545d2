"""The choice among schedules follows the costs and the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from goose_strategy.errors import ConfigError, PlanError
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE, make_schedule
from goose_strategy.pipeline_parallel.tables.choose import choose, format_figures
from goose_strategy.pipeline_parallel.tables.chunks import Schedule
from goose_strategy.pipeline_parallel.tables.insert import add_recompute
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations
from goose_strategy.pipeline_parallel.tables.simulate import Costs, simulate

RANKS, ROWS = 4, 32
ALL = [make_schedule(name, RANKS, m) for name in CATALOGUE for m in (8, 16)]


def costs(schedule: Schedule, latency: float = 0.05) -> Costs:
    """A model of 8 rows' work per rank, cut into the schedule's stages and microbatches."""
    stages = schedule.chunks.stages
    rows = ROWS / schedule.microbatches
    share = rows * RANKS / stages
    parts = tuple(share * part for part in (1.0, 1.2, 0.8))
    activations = (share,) * stages
    return Costs(*((part,) * stages for part in parts), latency=latency, activations=activations)


def test_the_fastest_is_taken_without_a_limit() -> None:
    choice = choose(ALL, costs)
    times = {id(s): simulate(s.table, costs(s), s.chunks).makespan for s in ALL}
    assert times[id(choice.best)] == min(times.values())
    assert [f.schedule for f in choice.figures] == ALL
    assert all(f.fits for f in choice.figures)


def test_a_limit_leaves_the_fastest_of_those_that_fit() -> None:
    limit = 8.0
    choice = choose(ALL, costs, limit)
    for figures in choice.figures:
        schedule = figures.schedule
        chunk = costs(schedule).activations[0]
        assert figures.memory == tuple(chunk * n for n in peak_activations(schedule.table))
        assert figures.fits == (max(figures.memory) <= limit)
    fitting = [f for f in choice.figures if f.fits]
    assert 0 < len(fitting) < len(ALL)
    best = next(f for f in choice.figures if f.schedule is choice.best)
    assert best.makespan == min(f.makespan for f in fitting)
    assert best.makespan > choose(ALL, costs).figures[0].makespan * 0.5
    tighter = choose(ALL, costs, 4.0)
    assert (tighter.best.name, tighter.best.microbatches) == ("VMin", 16)


def test_slow_messages_speak_against_interleaving() -> None:
    two = [make_schedule("Interleaved1F1B", 4, 8), make_schedule("1F1B", 4, 8)]
    assert choose(two, costs).best.name == "Interleaved1F1B"
    assert choose(two, lambda s: costs(s, latency=8.0)).best.name == "1F1B"


def test_the_smaller_of_equally_fast_ones_is_taken() -> None:
    candidates = [make_schedule("GPipe", 4, 8), make_schedule("1F1B", 4, 8)]
    assert choose(candidates, lambda s: costs(s, latency=0.0)).best.name == "1F1B"


def test_when_nothing_fits_the_least_is_named() -> None:
    with pytest.raises(PlanError, match=r"memory_limit_bytes=1 .* least is 4 with VMin, 16 mic"):
        choose(ALL, costs, 1.0)


def test_no_candidates_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"candidates=\[\]"):
        choose([], costs)


def test_the_figures_as_text() -> None:
    choice = choose(ALL[:4], costs, 20.0)
    lines = format_figures(choice).splitlines()
    assert len(lines) == 5
    assert [line[0] for line in lines[1:]] == ["x", "x", " ", "*"]
    assert "1F1B, 16 microbatches" in lines[4]


def test_what_stays_and_inputs_count_for_the_memory() -> None:
    schedule = make_schedule("GPipe", 2, 4)
    plain = Costs.even(2)
    more = replace(plain, activations=(3.0, 3.0), inputs=(0.0, 1.0), resident=(10.0, 20.0))
    (figures,) = choose([schedule], lambda _: more).figures
    assert figures.memory == (10 + 4 * 3, 20 + 4 * 3)
    again = schedule.with_table(add_recompute(schedule.table))
    (figures,) = choose([again], lambda _: more).figures
    # R takes the inputs of its microbatch; those of three more wait.
    assert figures.memory == (10 + 3, 20 + 3 + 3)


def test_measured_figures_have_units() -> None:
    costs = Costs((2e6,), (2e6,), (1e6,), activations=(2.0**20,))
    choice = choose([make_schedule("1F1B", 1, 2)], lambda _: costs)
    head, line = format_figures(choice, measured=True).splitlines()
    assert head.split() == ["schedule", "time/ms", "bubble", "memory/MiB"]
    assert line.split()[-3:] == ["10", "0.0%", "1"]
