"""The best of several schedules, found on paper.

No hand-made table is best for all costs: zero bubble loses where weight gradients are cheap,
interleaving where messages are slow, and the fastest often hold too much. So the candidates are
simulated. This is a pure function of its arguments; floats from measurements differ between
ranks, so one rank should call it and tell the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from goose_strategy.errors import ConfigError, PlanError
from goose_strategy.pipeline_parallel.tables.peaks import peak_memory
from goose_strategy.pipeline_parallel.tables.simulate import Costs, simulate

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.tables.chunks import Schedule


@dataclass(frozen=True)
class Figures:
    """What the simulation of one candidate says.

    Attributes:
        schedule: The candidate.
        makespan: Time of a step, in the unit of the costs.
        bubble: Idle share of all ranks' time.
        memory: Per rank, the most that it holds at once, in the unit of the costs.
        fits: Whether every rank keeps the limit.
    """

    schedule: Schedule
    makespan: float
    bubble: float
    memory: tuple[float, ...]
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The best candidate and the figures of all.

    Attributes:
        best: The candidate to use.
        figures: One entry per candidate, in the order given.
    """

    best: Schedule
    figures: tuple[Figures, ...]


def choose(
    candidates: Iterable[Schedule],
    costs: Callable[[Schedule], Costs],
    memory_limit: float | None = None,
) -> Choice:
    """Simulate candidates and return the fastest that fits.

    Of equally fast ones the one that holds less is taken, then the one named first.

    Args:
        candidates: Schedules for one number of ranks, all for the same batch: with more
            microbatches, each has fewer rows.
        costs: The costs of a candidate's actions and activations, which depend on its number of
            stages and microbatches.
        memory_limit: What a rank may hold at once, in the unit of ``Costs.activations``, what
            stays (``Costs.resident``) among it.

    Returns:
        The best candidate, and the figures of all.

    Raises:
        ConfigError: If there is no candidate.
        PlanError: If none fits; names the one that needs least.
    """
    figures = tuple(_figures(candidate, costs(candidate), memory_limit) for candidate in candidates)
    if not figures:
        raise ConfigError("candidates=[] leaves no schedule to choose; give at least one.")
    fitting = [entry for entry in figures if entry.fits]
    if not fitting:
        least = min(figures, key=lambda entry: max(entry.memory))
        raise PlanError(
            f"memory_limit_bytes={memory_limit:.0f} is less than every candidate needs; the least "
            f"is {max(least.memory):,.0f} with {_name(least.schedule)}. Raise the limit, recompute "
            "activations, or use more ranks or microbatches."
        )
    best = min(fitting, key=lambda entry: (entry.makespan, max(entry.memory)))
    return Choice(best.schedule, figures)


def format_figures(choice: Choice, *, measured: bool = False) -> str:
    """Return the figures as a table for people, the best marked with ``*``.

    Args:
        choice: What :func:`choose` returned.
        measured: The costs are nanoseconds and bytes; shown as milliseconds and MiB.
    """
    time, memory = ("time/ms", "memory/MiB") if measured else ("time", "memory")
    per_time, per_memory = (1e6, 2**20) if measured else (1.0, 1.0)
    lines = [f"  {'schedule':<52} {time:>10} {'bubble':>8} {memory:>10}"]
    for entry in choice.figures:
        mark = "*" if entry.schedule is choice.best else " " if entry.fits else "x"
        lines.append(
            f"{mark} {_name(entry.schedule):<52} {entry.makespan / per_time:>10.4g} "
            f"{entry.bubble:>8.1%} {max(entry.memory) / per_memory:>10.4g}"
        )
    return "\n".join(lines)


def _figures(schedule: Schedule, costs: Costs, memory_limit: float | None) -> Figures:
    result = simulate(schedule.table, costs, schedule.chunks)
    chunks = schedule.chunks
    activations = costs.activations or (1.0,) * chunks.stages
    peaks = peak_memory(schedule.table, activations, costs.inputs)
    resident = costs.resident or (0.0,) * chunks.stages
    memory = tuple(
        peak + sum(resident[stage] for stage in chunks.stages_of(rank))
        for rank, peak in enumerate(peaks)
    )
    fits = memory_limit is None or max(memory) <= memory_limit
    return Figures(schedule, result.makespan, result.bubble, memory, fits)


def _name(schedule: Schedule) -> str:
    per_rank = schedule.chunks.per_rank
    chunks = f", {per_rank} stages per rank" if per_rank > 1 else ""
    return f"{schedule.name}, {schedule.microbatches} microbatches{chunks}"
