"""Proofs that a table is complete and cannot hang, found before any rank runs it.

gloo buffers small sends and hides what NCCL deadlocks on: there, a send may wait for its receive,
and each communicator works through its operations in the order of their launch. The checks here
execute every table under exactly these rules. They share no code with what makes the tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.schedule import MESSAGES, Action, Kind, Table
from goose_strategy.pipeline_parallel.tables.chunks import Chunks, Schedule

_Positions: TypeAlias = dict[Kind, dict[int, int]]
"""Where in a row a stage's actions are, by kind and microbatch, in the order of the row."""

_MADE_FROM = {
    Kind.BACKWARD: Kind.FORWARD,
    Kind.INPUT: Kind.FORWARD,
    Kind.WEIGHT: Kind.INPUT,
    Kind.RECOMPUTE: Kind.FORWARD,
}


def check_table(
    table: Table, microbatches: int, *, chunks: Chunks | None = None, train: bool = True
) -> None:
    """Check the computations of a table.

    Every stage runs each microbatch's ``F`` once and, when training, later its ``B`` once, or its
    ``I`` once and later its ``W`` once. All stages take the microbatches in one order, because
    messages between two stages carry no number (``W`` sends nothing and may take any). An ``R``
    stands right before its backward, a ``T`` behind the last weight gradient of its stage.

    Args:
        table: The table, without messages.
        microbatches: Number of microbatches.
        chunks: Which rank holds which stages; one stage per rank if ``None``.
        train: Whether backwards belong to it.

    Raises:
        ScheduleError: Naming the first action that is wrong.
    """
    chunks = chunks or Chunks(len(table))
    if len(table) != chunks.ranks:
        raise ScheduleError(f"a table of {len(table)} rows is not one of {chunks.ranks} ranks.")
    orders: dict[str, tuple[int, list[int]]] = {}
    for rank, row in enumerate(table):
        for stage, positions in _positions(row, rank, chunks, microbatches).items():
            _check_counts(stage, positions, microbatches, train=train)
            _check_order_in_row(stage, positions)
            forwards = list(positions[Kind.FORWARD])
            gradients = {**positions[Kind.BACKWARD], **positions[Kind.INPUT]}
            backwards = sorted(gradients, key=gradients.__getitem__)
            for name, order in (("F", forwards), ("B", backwards)):
                first, expected = orders.setdefault(name, (stage, order))
                if order != expected:
                    raise ScheduleError(
                        f"stage {stage} takes {name} in the order {order}, stage {first} in "
                        f"{expected}; neighbours must agree, because their messages are not "
                        "numbered."
                    )
    _check_ties(table, chunks)


def check_schedule(schedule: Schedule, *, train: bool = True) -> None:
    """Check a schedule's table with :func:`check_table`.

    Raises:
        ScheduleError: Naming the schedule and the first action that is wrong.
    """
    try:
        check_table(schedule.table, schedule.microbatches, chunks=schedule.chunks, train=train)
    except ScheduleError as error:
        raise ScheduleError(f"{schedule.name}: {error}") from error


def _positions(
    row: Sequence[Action], rank: int, chunks: Chunks, microbatches: int
) -> dict[int, _Positions]:
    """Return, for each stage of a rank, where its actions are."""
    found: dict[int, _Positions] = {
        stage: {kind: {} for kind in Kind if kind not in MESSAGES}
        for stage in chunks.stages_of(rank)
    }
    for position, action in enumerate(row):
        stage, kind, microbatch = action
        if stage not in found or kind in MESSAGES:
            raise ScheduleError(f"{action} does not belong into row {rank} of a table.")
        places = found[stage][kind]
        if microbatch in places or not 0 <= microbatch < microbatches:
            order = [a.microbatch for a in row if a.stage == stage and a.kind is kind]
            raise ScheduleError(
                f"{action} is one too many: stage {stage} runs {kind} for microbatches {order}; "
                f"each of 0..{microbatches - 1} is needed once."
            )
        places[microbatch] = position
    return found


def _check_counts(stage: int, positions: _Positions, microbatches: int, *, train: bool) -> None:
    forwards, whole = positions[Kind.FORWARD], positions[Kind.BACKWARD]
    inputs, weights = positions[Kind.INPUT], positions[Kind.WEIGHT]
    if not train and (whole or inputs or weights):
        raise ScheduleError(f"stage {stage} has backwards in a table without training.")
    for microbatch in range(microbatches):
        if microbatch not in forwards:
            missing = Kind.FORWARD
        elif not train:
            continue
        elif microbatch in inputs and microbatch in whole:
            raise ScheduleError(
                f"{Action(stage, Kind.BACKWARD, microbatch)} does what "
                f"{Action(stage, Kind.INPUT, microbatch)} has done."
            )
        elif microbatch in inputs and microbatch not in weights:
            missing = Kind.WEIGHT
        elif microbatch not in inputs and microbatch not in whole:
            missing = Kind.INPUT if microbatch in weights else Kind.BACKWARD
        elif microbatch in whole and microbatch in weights:
            raise ScheduleError(
                f"{Action(stage, Kind.WEIGHT, microbatch)} has no "
                f"{Action(stage, Kind.INPUT, microbatch)} before it, but a B."
            )
        else:
            continue
        raise ScheduleError(
            f"{Action(stage, missing, microbatch)} is missing: stage {stage} runs {missing} for "
            f"microbatches {list(positions[missing])}; each of 0..{microbatches - 1} is needed "
            "once."
        )


def _check_order_in_row(stage: int, positions: _Positions) -> None:
    for kind, source in _MADE_FROM.items():
        for microbatch, position in positions[kind].items():
            if positions[source][microbatch] > position:
                raise ScheduleError(
                    f"{Action(stage, kind, microbatch)} comes before "
                    f"{Action(stage, source, microbatch)}."
                )
    for microbatch, position in positions[Kind.RECOMPUTE].items():
        backward = positions[Kind.BACKWARD].get(microbatch, positions[Kind.INPUT].get(microbatch))
        if backward != position + 1:
            raise ScheduleError(
                f"{Action(stage, Kind.RECOMPUTE, microbatch)} must stand right before its backward."
            )


def _check_ties(table: Table, chunks: Chunks) -> None:
    ends = {0, chunks.stages - 1}
    found: set[int] = set()
    for row in table:
        done: set[int] = set()
        for action in row:
            if action.kind is Kind.TIE:
                if action != (action.stage, Kind.TIE, 0) or action.stage not in ends:
                    raise ScheduleError(f"{action}: only 0T0 and {max(ends)}T0 tie weights.")
                done.add(action.stage)
                found.add(action.stage)
            elif action.stage in done and action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                raise ScheduleError(f"{action} comes after {action.stage}T0.")
    if found and (found != ends or chunks.rank_of(0) == chunks.rank_of(max(ends))):
        raise ScheduleError(f"stages {sorted(found)} tie weights; the first and the last one do.")


class _Message(NamedTuple):
    """A launched send, receive or tie on its way, with the rank at its other end."""

    action: Action
    peer: int
    partner: Action


# The communicator of a message.
_LANES = {
    Kind.SEND_FORWARD: "forward",
    Kind.RECEIVE_FORWARD: "forward",
    Kind.SEND_BACKWARD: "backward",
    Kind.RECEIVE_BACKWARD: "backward",
    Kind.TIE: "tie",
}
# The other end of a message, and whether its stage is the next (+1) or the previous (-1) one.
_PARTNERS = {
    Kind.SEND_FORWARD: (Kind.RECEIVE_FORWARD, 1),
    Kind.RECEIVE_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECEIVE_BACKWARD, -1),
    Kind.RECEIVE_BACKWARD: (Kind.SEND_BACKWARD, 1),
}


def check_messages(table: Table, chunks: Chunks | None = None, *, norms: bool = False) -> None:
    """Execute a table with its messages under the strictest rules of a backend.

    A send is complete only when its receive is, and on each communicator (forward, backward, tie)
    a rank's operations complete in the order of their launch, whoever their peers are. Two that
    meet must belong to each other, because messages carry no number.

    Args:
        table: A table with messages, whose computations passed :func:`check_table`.
        chunks: Which rank holds which stages; one stage per rank if ``None``.
        norms: Whether the ``W`` of a microbatch waits for the ``I`` of all stages.

    Raises:
        ScheduleError: If it cannot be executed to the end, two messages that meet do not belong
            to each other, a message is sent before it was computed, or there is one between two
            stages of a rank; names the actions that wait.
    """
    world = _World(table, chunks or Chunks(len(table)), norms=norms)
    ready = set(range(len(table)))
    while ready:
        rank = ready.pop()
        ready |= world.advance(rank)
    stuck = [str(row[at]) for row, at in zip(table, world.position, strict=True) if at < len(row)]
    unsent = [str(message.action) for lane in world.lanes.values() for message in lane]
    if stuck or unsent:
        raise ScheduleError(
            f"The schedule deadlocks: stages wait at {stuck or 'their end'}, "
            f"with messages {unsent} not matched."
        )


class _World:
    """Ranks that execute their rows, and the messages under way between them."""

    def __init__(self, table: Table, chunks: Chunks, *, norms: bool) -> None:
        self.table = table
        self.norms = norms
        self.holders = chunks.holders
        self.last = chunks.stages - 1
        self.position = [0] * len(table)
        self.lanes: dict[tuple[int, str], deque[_Message]] = {
            (rank, lane): deque() for rank in range(len(table)) for lane in _LANES.values()
        }
        self.done: set[Action] = set()

    def advance(self, rank: int) -> set[int]:
        """Run a rank as far as it comes; return the ranks whose messages have arrived."""
        row = self.table[rank]
        woken: set[int] = set()
        while self.position[rank] < len(row):
            action = row[self.position[rank]]
            if action.kind in _LANES:
                message = self._message(action, rank)
                self.lanes[rank, _LANES[action.kind]].append(message)
                self._deliver([(rank, _LANES[action.kind])], woken)
            elif all(need in self.done for need in self._needs(action)):
                self.done.add(action)
                if self.norms and action.kind is Kind.INPUT:
                    woken.update(range(len(self.table)))
            else:
                break
            self.position[rank] += 1
        return woken - {rank}

    def _needs(self, action: Action) -> list[Action]:
        """Return what must have been computed, or received by this rank, before ``action``."""
        stage, kind, microbatch = action
        if kind is Kind.FORWARD and stage > 0:
            if self.holders[stage - 1] == self.holders[stage]:
                return [Action(stage - 1, Kind.FORWARD, microbatch)]
            return [Action(stage, Kind.RECEIVE_FORWARD, microbatch)]
        if kind in (Kind.BACKWARD, Kind.INPUT) and stage < self.last:
            if self.holders[stage + 1] != self.holders[stage]:
                return [Action(stage, Kind.RECEIVE_BACKWARD, microbatch)]
            whole = Action(stage + 1, Kind.BACKWARD, microbatch)
            return [whole if whole in self.done else whole._replace(kind=Kind.INPUT)]
        if self.norms and kind is Kind.WEIGHT:
            return [Action(other, Kind.INPUT, microbatch) for other in range(self.last + 1)]
        return []

    def _message(self, action: Action, rank: int) -> _Message:
        stage, kind, microbatch = action
        if kind is Kind.TIE:
            other = self.last - stage
            return _Message(action, self.holders[other], Action(other, kind, microbatch))
        if kind in (Kind.SEND_FORWARD, Kind.RECEIVE_BACKWARD):
            # The shapes of a gradient are those of the outputs.
            made = Action(stage, Kind.FORWARD, microbatch) in self.done
        elif kind is Kind.SEND_BACKWARD:
            made = (
                Action(stage, Kind.INPUT, microbatch) in self.done
                or Action(stage, Kind.BACKWARD, microbatch) in self.done
            )
        else:
            made = True
        partner, step = _PARTNERS[kind]
        peer = stage + step
        if not made or not 0 <= peer <= self.last or self.holders[peer] == rank:
            reason = "what it needs was computed" if not made else "there is another rank to meet"
            raise ScheduleError(f"{action} comes before {reason}.")
        return _Message(action, self.holders[peer], Action(peer, partner, microbatch))

    def _deliver(self, changed: list[tuple[int, str]], woken: set[int]) -> None:
        """Complete every pair of messages that stand first on both sides."""
        while changed:
            rank, lane = changed.pop()
            queue = self.lanes[rank, lane]
            if not queue:
                continue
            mine = queue[0]
            theirs = self.lanes[mine.peer, lane]
            if not theirs or theirs[0].peer != rank:
                continue
            other = theirs[0].action
            if other.kind is not mine.partner.kind:
                continue
            if other != mine.partner:
                same = other.stage == mine.partner.stage
                what = "microbatch" if same else "stages"
                sent, received = sorted((mine.action, other), key=lambda a: "RECV" in a.kind)
                raise ScheduleError(f"{sent} meets {received}: not the same {what}.")
            self.done.update((queue.popleft().action, theirs.popleft().action))
            woken |= {rank, mine.peer}
            changed += [(rank, lane), (mine.peer, lane)]
