"""How many activations a table holds, known when it is made.

The unit is one chunk's activations of one microbatch. They are held from ``F`` until ``B``. Where
the backward is split they are held until ``W``, because ``W`` needs what the forward saved; if it
is known what ``I`` leaves to it (the inputs of the layers and the gradients of their outputs), that
counts instead from ``I`` on. With a recompute they are held from ``R`` on; before it, only the
stage's inputs are, which count as nothing unless their memory is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table


def peak_activations(table: Table) -> tuple[int, ...]:
    """Return, per rank, how many chunks' activations are held at once at most."""
    stages = 1 + max((action.stage for row in table for action in row), default=0)
    return tuple(int(peak) for peak in peak_memory(table, (1,) * stages))


def peak_memory(
    table: Table,
    activations: Sequence[float],
    inputs: Sequence[float] | None = None,
    *,
    put_off: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Return, per rank, the memory of activations held at once at most.

    Args:
        table: One row per rank, with or without messages.
        activations: Per stage, the memory of one microbatch's activations, its inputs among them,
            in any unit.
        inputs: Per stage, the memory of one microbatch's inputs alone, which are kept from ``F``
            to ``R``; none if ``None``.
        put_off: Per stage, the memory that is held for one microbatch from ``I`` to ``W``; that of
            its activations if ``None``.

    Returns:
        The peaks in the same unit.
    """
    peaks = []
    for row in table:
        again = _recomputed(row)
        held = peak = 0.0
        for action in row:
            stage = action.stage
            if put_off is not None and action.kind in (Kind.INPUT, Kind.WEIGHT):
                freed = activations[stage] if action.kind is Kind.INPUT else 0
                held += put_off[stage] * (1 if action.kind is Kind.INPUT else -1) - freed
            else:
                held += _change(action, again) * activations[stage]
            if inputs is not None and (stage, action.microbatch) in again:
                held += {Kind.FORWARD: 1, Kind.RECOMPUTE: -1}.get(action.kind, 0) * inputs[stage]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def peak_by_stage(table: Table) -> dict[int, int]:
    """Return, per stage, how many microbatches' activations are held at once at most."""
    peaks: Counter[int] = Counter()
    for row in table:
        again = _recomputed(row)
        held: Counter[int] = Counter()
        for action in row:
            held[action.stage] += _change(action, again)
            peaks[action.stage] = max(peaks[action.stage], held[action.stage])
    return dict(sorted(peaks.items()))


def _recomputed(row: Sequence[Action]) -> set[tuple[int, int]]:
    """Return the stages and microbatches whose forward keeps no activations."""
    return {(a.stage, a.microbatch) for a in row if a.kind is Kind.RECOMPUTE}


def _change(action: Action, again: Collection[tuple[int, int]]) -> int:
    """Return by how many microbatches' activations an action holds more than before."""
    if action.kind is Kind.FORWARD:
        return int((action.stage, action.microbatch) not in again)
    return {Kind.RECOMPUTE: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1}.get(action.kind, 0)
