"""V-Half and V-Min: over a V of stages with a half and a third of 1F1B's activations.

After "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362), which torch lacks. How
long a chunk's activations live depends on how fast a microbatch goes down and up the V, so the
pace bounds the memory. One microbatch's actions are laid out at such a pace, the layout is repeated
every six slots (two chunks times F, I and W), and what is idle at the start and at the end is then
filled as far as the bound allows. Here the gaps that keep the repeated layouts apart are searched
for, instead of being given by a formula for each remainder of the number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple, TypeAlias

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations
from goose_strategy.pipeline_parallel.tables.simulate import time_table

_PERIOD = 6

_Slots: TypeAlias = dict[int, Action]
"""What a rank does in which unit of time; absent slots are idle."""


def v_half(ranks: int, microbatches: int) -> Table:
    """Return V-Half: at most ``(ranks + 2) // 2`` microbatches' activations on every rank.

    Args:
        ranks: Number of ranks, two stages each.
        microbatches: Number of microbatches, any number >= 1.

    Returns:
        The table of ``F``, ``I`` and ``W`` actions, one row per rank.
    """
    return _controlled(ranks, microbatches, pace=2, bound=2 * ((ranks + 2) // 2))


def v_min(ranks: int, microbatches: int) -> Table:
    """Return V-Min: at most ``(ranks + 4) // 3`` microbatches' activations on every rank.

    Its bubble is larger than that of :func:`v_half`, and it depends more on equal stages.

    Args:
        ranks: Number of ranks, two stages each.
        microbatches: Number of microbatches, any number >= 1.

    Returns:
        The table of ``F``, ``I`` and ``W`` actions, one row per rank.
    """
    return _controlled(ranks, microbatches, pace=1, bound=2 * ((ranks + 4) // 3))


def _controlled(ranks: int, microbatches: int, *, pace: int, bound: int) -> Table:
    rows = _repeat(_layout(ranks, pace, bound), microbatches)
    rows = _start_at_once([_with_weights(row) for row in rows])
    rows = [{slot: a for slot, a in row.items() if a.kind is not Kind.WEIGHT} for row in rows]
    _Plan(rows, bound).fill()
    return _in_order([_with_weights(row) for row in rows])


class _Offsets(NamedTuple):
    """When a rank does what for microbatch 0: on its stage on the way down, and on the way up."""

    forward_down: int
    forward_up: int
    input_up: int
    input_down: int


@lru_cache(maxsize=64)
def _layout(ranks: int, pace: int, bound: int) -> tuple[_Offsets, ...]:
    """Return the tightest layout that can be repeated and meets the bound.

    A microbatch takes ``pace`` slots from rank to rank on its way down the V (and its gradients on
    theirs down), one on its way up. It may wait before its backward starts to go down, and before
    it comes back up: without that, two microbatches would meet in one slot.
    """
    pairs = product(range(_PERIOD), range(_PERIOD))
    for waits in sorted(pairs, key=lambda pair: (sum(pair), pair)):
        layout = tuple(_offsets(rank, ranks, pace, waits) for rank in range(ranks))
        if any(len({offset % _PERIOD for offset in rank}) < len(rank) for rank in layout):
            continue
        rows = [_with_weights(row) for row in _repeat(layout, 2 * ranks)]
        if max(peak_activations(_in_order(rows))) <= bound:
            return layout
    raise ScheduleError(f"no layout for ranks={ranks} holds at most {bound} chunks.")


def _offsets(rank: int, ranks: int, pace: int, waits: tuple[int, int]) -> _Offsets:
    after = ranks - 1 - rank
    turn = pace * (ranks - 1) + 1
    first_input = turn + ranks + waits[0]
    second_turn = first_input + pace * (ranks - 1) + 1 + waits[1]
    return _Offsets(pace * rank, turn + after, first_input + pace * rank, second_turn + after)


def _repeat(layout: tuple[_Offsets, ...], microbatches: int) -> list[_Slots]:
    """Lay out every microbatch, one period after the one before it; without ``W``."""
    rows = []
    for rank, offsets in enumerate(layout):
        down, up = rank, 2 * len(layout) - 1 - rank
        kinds = (
            (offsets.forward_down, down, Kind.FORWARD),
            (offsets.forward_up, up, Kind.FORWARD),
            (offsets.input_up, up, Kind.INPUT),
            (offsets.input_down, down, Kind.INPUT),
        )
        rows.append(
            {
                offset + _PERIOD * mb: Action(stage, kind, mb)
                for offset, stage, kind in kinds
                for mb in range(microbatches)
            }
        )
    return rows


def _with_weights(row: _Slots) -> _Slots:
    """Put each ``W`` into the first free slot after its ``I``, in the order of the ``I``."""
    out = dict(row)
    waiting: deque[Action] = deque()
    slot, end = 0, max(row)
    while slot <= end or waiting:
        action = row.get(slot)
        if action is None:
            if waiting:
                out[slot] = waiting.popleft()
        elif action.kind is Kind.INPUT:
            waiting.append(action._replace(kind=Kind.WEIGHT))
        slot += 1
    return out


def _in_order(rows: list[_Slots]) -> Table:
    return tuple(tuple(row[slot] for slot in sorted(row)) for row in rows)


def _start_at_once(rows: list[_Slots]) -> list[_Slots]:
    """Keep the orders, and start each action as soon as it can."""
    chunks = Chunks(len(rows), 2, "v")
    timeline = time_table(_in_order(rows), chunks, lambda _: 1.0, 0.0)
    return [{int(span.start): span.action for span in row} for row in timeline]


class _Plan:
    """Rows without ``W`` in which actions are moved to earlier slots.

    Where a slot stays free, a ``W`` is thought of as done in it, if one is due; so the state
    behind a slot is the number of chunks held and the number of ``W`` due.
    """

    def __init__(self, rows: list[_Slots], bound: int) -> None:
        self.rows = rows
        self.bound = bound
        self.last = 2 * len(rows) - 1
        self.slots = {action: slot for row in rows for slot, action in row.items()}
        self.states: list[list[tuple[int, int]]] = []
        for row in rows:
            self.states.append([])
            self._update(row, self.states[-1], 0, max(row), check=False)

    def fill(self) -> None:
        """Move each action as far ahead as its inputs and the bound allow."""
        order = [(slot, rank, a) for rank, row in enumerate(self.rows) for slot, a in row.items()]
        for slot, rank, action in sorted(order):
            row, states = self.rows[rank], self.states[rank]
            ready = 1 + max((self.slots[need] for need in self._needs(action)), default=-1)
            for earlier in range(ready, slot):
                if earlier in row:
                    continue
                del row[slot]
                row[earlier] = action
                if self._update(row, states, earlier, slot, check=True):
                    self.slots[action] = earlier
                    break
                del row[earlier]
                row[slot] = action

    def _update(
        self, row: _Slots, states: list[tuple[int, int]], start: int, end: int, *, check: bool
    ) -> bool:
        """Recompute the states from ``start`` on, at least to ``end``; keep them within the bound.

        Returns:
            Whether the bound is kept. If it is not, the states are as they were.
        """
        held, due = states[start - 1] if start else (0, 0)
        new: list[tuple[int, int]] = []
        for slot in range(start, max(end + 1, len(states))):
            action = row.get(slot)
            if action is None:
                held, due = held - (due > 0), due - (due > 0)
            elif action.kind is Kind.FORWARD:
                held += 1
            else:
                due += 1
            if check and held > self.bound:
                return False
            if slot > end and states[slot] == (held, due):
                break
            new.append((held, due))
        states[start : start + len(new)] = new
        return True

    def _needs(self, action: Action) -> Iterator[Action]:
        stage, kind, microbatch = action
        if microbatch > 0:
            yield Action(stage, kind, microbatch - 1)
        if kind is Kind.FORWARD:
            if stage > 0:
                yield Action(stage - 1, kind, microbatch)
        elif stage == self.last:
            yield Action(stage, Kind.FORWARD, microbatch)
        else:
            yield Action(stage + 1, kind, microbatch)
