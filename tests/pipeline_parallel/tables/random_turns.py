"""Executes a table one step at a time in random turns; written without the checks' code."""

from __future__ import annotations

import random

from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table
from goose_strategy.pipeline_parallel.tables.chunks import Chunks

PARTNERS = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1),
            "RECV_B": ("SEND_B", 1)}  # fmt: skip


class RandomTurns:
    """Ranks that take turns at random; a message is done when it stands first at both ends."""

    def __init__(self, table: Table, chunks: Chunks, chance: random.Random) -> None:
        self.rows = [list(row) for row in table]
        self.chunks = chunks
        self.chance = chance
        self.finished: set[Action] = set()
        self.queues: dict[tuple[int, str], list[Action]] = {}

    def finishes(self) -> bool:
        """Return whether every rank comes to its end."""
        moved = True
        while moved:
            ranks = list(range(len(self.rows)))
            self.chance.shuffle(ranks)
            moved = any(self._step(rank) for rank in ranks)
            moved |= any(self._exchange(lane, queue) for (_, lane), queue in self.queues.items())
        return not any(self.rows) and not any(self.queues.values())

    def _step(self, rank: int) -> bool:
        row = self.rows[rank]
        if not row or not self._needs(row[0]) <= self.finished:
            return False
        action = row.pop(0)
        if action.kind.value in PARTNERS:
            self.queues.setdefault((rank, action.kind.value[-1]), []).append(action)
        else:
            self.finished.add(action)
        return True

    def _needs(self, action: Action) -> set[Action]:
        stage, kind, microbatch = action
        if kind is Kind.FORWARD and stage > 0:
            local = self.chunks.is_local(stage - 1)
            return {Action(stage - local, Kind("F" if local else "RECV_F"), microbatch)}
        if kind in (Kind.BACKWARD, Kind.INPUT) and stage < self.chunks.stages - 1:
            if not self.chunks.is_local(stage):
                return {Action(stage, Kind("RECV_B"), microbatch)}
            split = Action(stage + 1, Kind("I"), microbatch)
            return {split if split in self.finished else Action(stage + 1, Kind("B"), microbatch)}
        return set()

    def _exchange(self, lane: str, queue: list[Action]) -> bool:
        if not queue:
            return False
        kind, step = PARTNERS[queue[0].kind.value]
        partner = Action(queue[0].stage + step, Kind(kind), queue[0].microbatch)
        other = self.queues.get((self.chunks.rank_of(partner.stage), lane))
        if not other or other[0] != partner:
            return False
        self.finished |= {queue.pop(0), other.pop(0)}
        return True
