"""How many activations a table holds, known when it is made.

The unit is one chunk's activations of one microbatch. They are held from ``F`` until ``B``. Where
the backward is split they are held until ``W``: ``I`` frees nothing by itself, because ``W`` needs
what the forward saved. With a recompute they are held from ``R`` on; before it, only the stage's
inputs are, which are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table


def peak_activations(table: Table) -> tuple[int, ...]:
    """Return, per rank, how many chunks' activations are held at once at most."""
    stages = 1 + max((action.stage for row in table for action in row), default=0)
    return tuple(int(peak) for peak in peak_memory(table, (1,) * stages))


def peak_memory(table: Table, activations: Sequence[float]) -> tuple[float, ...]:
    """Return, per rank, the memory of activations held at once at most.

    Args:
        table: One row per rank, with or without messages.
        activations: Per stage, the memory of one microbatch's activations, in any unit.

    Returns:
        The peaks in the same unit.
    """
    peaks = []
    for row in table:
        held = peak = 0.0
        for stage, change in _changes(row):
            held += change * activations[stage]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def peak_by_stage(table: Table) -> dict[int, int]:
    """Return, per stage, how many microbatches' activations are held at once at most."""
    peaks: Counter[int] = Counter()
    for row in table:
        held: Counter[int] = Counter()
        for stage, change in _changes(row):
            held[stage] += change
            peaks[stage] = max(peaks[stage], held[stage])
    return dict(sorted(peaks.items()))


def _changes(row: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """Yield (stage, +1 or -1) for each action that begins or ends to hold activations."""
    again = {(a.stage, a.microbatch) for a in row if a.kind is Kind.RECOMPUTE}
    for action in row:
        if action.kind is Kind.FORWARD:
            if (action.stage, action.microbatch) not in again:
                yield action.stage, 1
        elif action.kind is Kind.RECOMPUTE:
            yield action.stage, 1
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            yield action.stage, -1
