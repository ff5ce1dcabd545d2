"""Schedules in which a microbatch's weight gradients wait for all stages: private training.

A weight gradient that is clipped per sample needs each sample's norm over the whole model, so the
``W`` of a microbatch may run once every stage has run its ``I``. torch has no such schedules. Here
any table is turned into one: forwards and input gradients keep their order, a ``B`` becomes an
``I``, and each ``W`` goes where its rank would otherwise wait, or where it must free memory. Which
place that is comes from a clock: the table is an order in which all ranks could have run, so no
rank ever waits for one that waits for it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks, Schedule

_START = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT)
# Input gradients come with norms, so they take a little longer; the sum of the norms travels.
_COSTS = {Kind.FORWARD: 1.0, Kind.INPUT: 1.1, Kind.WEIGHT: 1.0}
_TRAVEL = 0.1


class Norms(NamedTuple):
    """For what a ``W`` waits besides its ``I``.

    Attributes:
        across_stages: Whether for the ``I`` of all stages, or for its own alone.
        extra: See :func:`wait_for_norms`.
    """

    across_stages: bool = True
    extra: int = 1


def split_in_place(schedule: Schedule) -> Schedule:
    """Turn each ``B`` into an ``I`` with its ``W`` behind it; for clipping stage by stage.

    Args:
        schedule: Any schedule with backwards.

    Returns:
        The same order of work.
    """
    rows = []
    for row in schedule.table:
        out: list[Action] = []
        for action in row:
            if action.kind is Kind.BACKWARD:
                out += [action._replace(kind=Kind.INPUT), action._replace(kind=Kind.WEIGHT)]
            else:
                out.append(action)
        rows.append(tuple(out))
    return schedule.with_table(tuple(rows))


def wait_for_norms(schedule: Schedule, *, extra: int) -> Schedule:
    """Put every ``W`` behind the ``I`` of all stages.

    Args:
        schedule: Any schedule with backwards, without messages.
        extra: Microbatches that every rank may hold beyond the largest number that a rank of the
            schedule holds; each hides more of the time that the sum of the norms travels.

    Returns:
        The schedule with ``I`` and ``W`` only.

    Raises:
        ScheduleError: If the forwards and input gradients cannot be executed in their order.
    """
    chunks = schedule.chunks
    if chunks.ranks == 1:
        # Nothing is behind: whoever holds all stages has all norms.
        extra = 0
    most = max(peak_activations(schedule.table)) + extra * chunks.per_rank
    return schedule.with_table(_Clock(schedule.table, chunks, most).run())


class _Clock:
    """Ranks that take their actions on paper, the earliest first."""

    def __init__(self, table: Table, chunks: Chunks, most: int) -> None:
        self.chunks = chunks
        self.most = most
        self.rows = [
            [
                action._replace(kind=Kind.INPUT) if action.kind is Kind.BACKWARD else action
                for action in row
                if action.kind in _START
            ]
            for row in table
        ]
        self.out: list[list[Action]] = [[] for _ in table]
        self.at = [0] * len(table)
        self.now = [0.0] * len(table)
        self.held = [0] * len(table)
        self.put_off: list[list[Action]] = [[] for _ in table]
        self.ended: dict[Action, float] = {}
        self.inputs: Counter[int] = Counter()
        self.norms: dict[int, float] = {}

    def run(self) -> Table:
        """Return the rows in which the ranks took their actions."""
        total = sum(len(row) for row in self.rows)
        total += sum(action.kind is Kind.INPUT for row in self.rows for action in row)
        for _ in range(total):
            ranks = range(len(self.rows))
            choices = [choice for rank in ranks for choice in self._choices(rank, full=False)]
            # Where everybody would wait for memory, one may have more.
            choices = choices or [c for rank in ranks for c in self._choices(rank, full=True)]
            if not choices:
                stuck = [str(r[i]) for r, i in zip(self.rows, self.at, strict=True) if i < len(r)]
                raise ScheduleError(f"The table deadlocks: {', '.join(stuck)} wait.")
            start, _, rank, action = min(choices)
            self._take(rank, action, start)
        return tuple(tuple(row) for row in self.out)

    def _choices(self, rank: int, *, full: bool) -> list[tuple[float, int, int, Action]]:
        """Return what a rank may do next and when, what others wait for first."""
        found = []
        row, at = self.rows[rank], self.at[rank]
        if at < len(row):
            action = row[at]
            ready = self._ready(action)
            has_room = full or action.kind is Kind.INPUT or self.held[rank] < self.most
            if ready is not None and has_room:
                found.append((max(ready, self.now[rank]), 0, rank, action))
        for action in self.put_off[rank]:
            known = self.norms.get(action.microbatch)
            if known is not None:
                found.append((max(known, self.now[rank]), 1, rank, action))
                break
        return found

    def _ready(self, action: Action) -> float | None:
        stage, kind, microbatch = action
        if kind is Kind.FORWARD:
            if stage == 0:
                return 0.0
            return self.ended.get(Action(stage - 1, kind, microbatch))
        if stage == self.chunks.stages - 1:
            return self.ended.get(Action(stage, Kind.FORWARD, microbatch))
        return self.ended.get(Action(stage + 1, kind, microbatch))

    def _take(self, rank: int, action: Action, start: float) -> None:
        end = start + _COSTS[action.kind]
        self.now[rank] = self.ended[action] = end
        self.out[rank].append(action)
        if action.kind is Kind.WEIGHT:
            self.put_off[rank].remove(action)
            self.held[rank] -= 1
            return
        self.at[rank] += 1
        if action.kind is Kind.FORWARD:
            self.held[rank] += 1
            return
        microbatch = action.microbatch
        self.put_off[rank].append(action._replace(kind=Kind.WEIGHT))
        self.put_off[rank].sort(key=lambda weight: (weight.microbatch, -weight.stage))
        self.inputs[microbatch] += 1
        if self.inputs[microbatch] == self.chunks.stages:
            ends = [
                self.ended[Action(stage, Kind.INPUT, microbatch)]
                for stage in range(self.chunks.stages)
            ]
            self.norms[microbatch] = max(ends) + (_TRAVEL if self.chunks.ranks > 1 else 0.0)
