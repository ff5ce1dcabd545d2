"""Schedules over a V of stages: rank ``r`` holds stages ``r`` and ``2 * ranks - 1 - r``.

The last stage is on the rank of the first, so a microbatch's backward starts where its forward
did, and every rank holds as many activations as every other. The orders are those of ZB-V (arXiv
2401.10241, section 6) and of DualPipeV (DeepSeek's cut of DualPipe, arXiv 2412.19437). torch has
both, but refuses fewer microbatches than stages under DualPipeV.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table


class _Row:
    """A row under construction, in which microbatches are numbered as they come."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.overlapped: list[Action] = []
        self.waiting: deque[Action] = deque()
        self._counts: Counter[tuple[int, Kind]] = Counter()

    def forward(self, stage: int) -> None:
        self._add(stage, Kind.FORWARD, counter=Kind.FORWARD)

    def backward(self, stage: int, *, split: bool = False) -> None:
        """Add a ``B``, or an ``I`` whose ``W`` is put on the waiting list."""
        kind = Kind.INPUT if split else Kind.BACKWARD
        self._add(stage, kind, counter=Kind.BACKWARD)
        if split:
            self.waiting.append(self.actions[-1]._replace(kind=Kind.WEIGHT))

    def weight(self) -> None:
        """Add the ``W`` that waits longest, if there is one."""
        if self.waiting:
            self.actions.append(self.waiting.popleft())

    def pair(self, forward: int, backward: int) -> None:
        """Add a forward and a backward that may overlap."""
        self.forward(forward)
        self.overlapped.append(self.actions[-1])
        self.backward(backward)

    def count(self, stage: int) -> int:
        """Return how many forwards of a stage there are."""
        return self._counts[stage, Kind.FORWARD]

    def _add(self, stage: int, kind: Kind, *, counter: Kind) -> None:
        self.actions.append(Action(stage, kind, self._counts[stage, counter]))
        self._counts[stage, counter] += 1


def zbv(ranks: int, microbatches: int) -> Table:
    """Return ZB-V: no idle time at F = I = W but for the start, at the memory of 1F1B.

    Args:
        ranks: Number of ranks, two stages each.
        microbatches: Number of microbatches, any number >= 1.

    Returns:
        The table of ``F``, ``I`` and ``W`` actions, one row per rank.
    """
    # The pattern needs this many to be filled; fewer leave holes in it.
    filled = max(2 * ranks - 1, microbatches)
    rows = [_zbv_row(rank, ranks, filled).actions for rank in range(ranks)]
    return tuple(tuple(a for a in row if a.microbatch < microbatches) for row in rows)


def _zbv_row(rank: int, ranks: int, microbatches: int) -> _Row:
    row, down, up = _Row(), rank, 2 * ranks - 1 - rank

    def both(stage: int) -> None:
        row.backward(stage, split=True)
        row.weight()

    for _ in range(2 * (ranks - rank) - 1):
        row.forward(down)
    for _ in range(rank):
        row.forward(up)
        row.forward(down)
    for _ in range(ranks - rank):
        row.forward(up)
        both(up)
    while row.count(up) < microbatches:
        if row.count(down) < microbatches:
            row.forward(down)
        both(down)
        row.forward(up)
        both(up)
    for _ in range(rank):
        row.backward(down, split=True)
        row.backward(up, split=True)
    late = list(row.waiting)
    row.waiting = deque(action for action in late if action.stage == down)
    for _ in range(ranks - rank):
        row.backward(down, split=True)
        row.weight()
    row.actions += [action for action in late if action.stage == up]
    row.actions += row.waiting
    return row


def dualpipev(ranks: int, microbatches: int) -> tuple[Table, frozenset[Action]]:
    """Return DualPipeV: forwards next to backwards of the rank's other stage, to be overlapped.

    Args:
        ranks: Number of ranks, two stages each.
        microbatches: Number of microbatches, any number >= 1; from ``2 * ranks`` on it is filled.

    Returns:
        The table of ``F``, ``B``, ``I`` and ``W`` actions, one row per rank, and the forwards that
        may run at the same time as the backward behind them.
    """
    rows = [_dualpipev_row(rank, ranks, max(2 * ranks, microbatches)) for rank in range(ranks)]
    table = tuple(tuple(a for a in row.actions if a.microbatch < microbatches) for row in rows)
    follower = {a: b for row in table for a, b in pairwise(row)}
    # Where the pattern has holes, a forward's partner may be missing.
    pairs = (
        forward
        for row in rows
        for forward in row.overlapped
        if forward in follower
        and follower[forward].kind is Kind.BACKWARD
        and follower[forward].stage != forward.stage
    )
    return table, frozenset(pairs)


def _dualpipev_row(rank: int, ranks: int, microbatches: int) -> _Row:
    row, down, up = _Row(), rank, 2 * ranks - 1 - rank
    after = ranks - 1 - rank
    for _ in range(2 * after):
        row.forward(down)
    for _ in range(rank + 1):
        row.forward(down)
        row.forward(up)
    for _ in range(after):
        row.backward(up, split=True)
        row.weight()
        row.forward(up)
    for step in range(microbatches - 2 * ranks + rank + 1):
        if step == 0 and after == 0:
            # The last rank starts its first pair one after the other, which loses no time.
            row.forward(down)
            row.backward(up)
        else:
            row.pair(down, up)
        row.pair(up, down)
    for _ in range(after):
        row.backward(up)
        row.pair(up, down)
    # From the middle on the backwards are split, so that the ends of all ranks come together.
    middle, odd = divmod(rank + 1, 2)
    for step in range(rank + 1):
        row.backward(up, split=step > middle or (step == middle and not odd))
        row.backward(down, split=step >= middle)
    for _ in range(after):
        row.weight()
        row.backward(down, split=True)
    for _ in range(rank + 1):
        row.weight()
    return row
