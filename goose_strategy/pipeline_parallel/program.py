"""From a schedule to what a stage executes: the table with its messages, proved not to hang.

gloo buffers small sends and hides what NCCL deadlocks on: there, a send may wait for its receive,
and each communicator works through its operations in the order of their launch. The check here
executes every program under exactly these rules before any rank runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Table,
    check_table,
    forward_only,
)
from goose_strategy.validate import one_of, positive


@lru_cache(maxsize=64)
def program(schedule: str, stages: int, microbatches: int, *, train: bool = True) -> Table:
    """Return the checked table of a schedule with its messages: what the engine executes.

    Args:
        schedule: A key of `SCHEDULES`; unused for ``train=False``.
        stages: Number of stages.
        microbatches: Number of microbatches.
        train: With backwards, or only forwards.

    Returns:
        Per stage its actions, messages included. Cached: a run makes it once.

    Raises:
        ConfigError: If the schedule is unknown or a number is not positive.
        ScheduleError: If the table is incomplete or would deadlock.
    """
    one_of(SCHEDULES, schedule=schedule)
    positive(stages=stages, microbatches=microbatches)
    make = SCHEDULES[schedule] if train else forward_only
    table = make(stages, microbatches)
    check_table(table, microbatches, train=train)
    lowered = add_messages(table)
    check_messages(lowered)
    return lowered


@dataclass(frozen=True)
class StageProgram:
    """What one stage executes.

    Attributes:
        actions: Its row, messages included.
        last_backward: Its last ``B``, if it has one.
        taken: For an action that waits for a neighbour's message, the stage's own sends that this
            neighbour must have taken before it sent that message. To wait for them then costs
            nothing, and their tensors can be freed.
    """

    actions: tuple[Action, ...]
    last_backward: Action | None
    taken: Mapping[Action, tuple[Action, ...]]


@lru_cache(maxsize=64)
def stage_program(
    schedule: str, stages: int, microbatches: int, *, train: bool, stage: int
) -> StageProgram:
    """Return the row of one stage of :func:`program`, with what the engine looks up in it.

    Args:
        schedule: A key of ``SCHEDULES``.
        stages: Number of stages.
        microbatches: Number of microbatches.
        train: With backwards, or only forwards.
        stage: Number of the stage.

    Returns:
        The stage's part. Cached.
    """
    table = program(schedule, stages, microbatches, train=train)
    backwards = [action for action in table[stage] if action.kind is Kind.BACKWARD]
    # The gradients of a microbatch say that its hidden states arrived.
    taken: dict[Action, tuple[Action, ...]] = {}
    taken |= {b: (b._replace(kind=Kind.SEND_FORWARD),) for b in backwards if stage < stages - 1}
    if stage > 0:
        taken |= _gradients_taken(table[stage - 1], stage)
    return StageProgram(table[stage], backwards[-1] if backwards else None, taken)


def _gradients_taken(previous: tuple[Action, ...], stage: int) -> dict[Action, tuple[Action, ...]]:
    """Return which gradients the previous stage used before each of its forwards."""
    taken: dict[Action, tuple[Action, ...]] = {}
    since: list[Action] = []
    for action in previous:
        if action.kind is Kind.BACKWARD:
            since.append(Action(stage, Kind.SEND_BACKWARD, action.microbatch))
        elif action.kind is Kind.FORWARD and since:
            taken[action._replace(stage=stage)] = tuple(since)
            since = []
    return taken


def add_messages(table: Table) -> Table:
    """Insert sends and receives into a table of ``F`` and ``B`` actions.

    A send follows its action at once. A receive is posted one compute action ahead of the action
    that waits for it, so that the message travels while the stage computes. Further ahead would be
    wrong: on a communicator that works through its operations in order, a receive posted too early
    holds up the send behind it, and from three stages on that is a deadlock.

    Args:
        table: The table; one stage per row.

    Returns:
        The table with ``SEND_*`` and ``RECV_*`` actions.
    """
    last = len(table) - 1
    rows = []
    for row in table:
        out: list[Action] = []
        for index, action in enumerate(row):
            if index == 0:
                out += _receives(action, last)
            if index + 1 < len(row) and not _is_first_use(row[index + 1], action):
                out += _receives(row[index + 1], last)
            out.append(action)
            out += _sends(action, last)
            if index + 1 < len(row) and _is_first_use(row[index + 1], action):
                out += _receives(row[index + 1], last)
        rows.append(tuple(out))
    return tuple(rows)


def _is_first_use(later: Action, action: Action) -> bool:
    """Tell whether ``later`` is the backward of the very forward before it.

    The shapes of its gradients are those of the forward's outputs, unknown until it has run.
    """
    return later.kind is Kind.BACKWARD and later.microbatch == action.microbatch


def _receives(action: Action, last: int) -> list[Action]:
    if action.kind is Kind.FORWARD and action.stage > 0:
        return [action._replace(kind=Kind.RECEIVE_FORWARD)]
    if action.kind is Kind.BACKWARD and action.stage < last:
        return [action._replace(kind=Kind.RECEIVE_BACKWARD)]
    return []


def _sends(action: Action, last: int) -> list[Action]:
    if action.kind is Kind.FORWARD and action.stage < last:
        return [action._replace(kind=Kind.SEND_FORWARD)]
    if action.kind is Kind.BACKWARD and action.stage > 0:
        return [action._replace(kind=Kind.SEND_BACKWARD)]
    return []


class _Message(NamedTuple):
    """A launched send or receive on its way."""

    action: Action
    peer: int


# Which communicator a message uses, and whether its peer is the stage below (+1) or above (-1).
_LANES = {
    Kind.SEND_FORWARD: ("forward", 1),
    Kind.RECEIVE_FORWARD: ("forward", -1),
    Kind.SEND_BACKWARD: ("backward", -1),
    Kind.RECEIVE_BACKWARD: ("backward", 1),
}
_PARTNER = {
    Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD,
    Kind.RECEIVE_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD,
    Kind.RECEIVE_BACKWARD: Kind.SEND_BACKWARD,
}
_WAITS_FOR = {Kind.FORWARD: Kind.RECEIVE_FORWARD, Kind.BACKWARD: Kind.RECEIVE_BACKWARD}


def check_messages(table: Table) -> None:
    """Execute a table with its messages under the strictest rules of a backend.

    A send is complete only when its receive is, and on each of the two communicators (forward,
    backward) a stage's operations complete in the order of their launch.

    Args:
        table: A table from :func:`add_messages`.

    Raises:
        ScheduleError: If it cannot be executed to the end, or two messages that meet belong to
            different microbatches; names the actions that wait.
    """
    position = [0] * len(table)
    lanes: dict[tuple[int, str], deque[_Message]] = {}
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(table):
            while position[stage] < len(row) and _may_run(row[position[stage]], row, done):
                _launch(row[position[stage]], lanes, done)
                position[stage] += 1
                moved = True
        moved |= _deliver(lanes, done)
    stuck = [str(row[at]) for row, at in zip(table, position, strict=True) if at < len(row)]
    unsent = [str(message.action) for lane in lanes.values() for message in lane]
    if stuck or unsent:
        raise ScheduleError(
            f"The schedule deadlocks: stages wait at {stuck or 'their end'}, "
            f"with messages {unsent} not matched."
        )


def _may_run(action: Action, row: tuple[Action, ...], done: set[Action]) -> bool:
    if action.kind not in _WAITS_FOR:
        return True
    message = action._replace(kind=_WAITS_FOR[action.kind])
    return message in done or message not in row


def _launch(
    action: Action, lanes: dict[tuple[int, str], deque[_Message]], done: set[Action]
) -> None:
    if action.kind not in _LANES:
        done.add(action)
        return
    lane, step = _LANES[action.kind]
    message = _Message(action, action.stage + step)
    lanes.setdefault((action.stage, lane), deque()).append(message)


def _deliver(lanes: dict[tuple[int, str], deque[_Message]], done: set[Action]) -> bool:
    """Complete every pair of messages that stand first on both sides."""
    moved = False
    for (stage, lane), queue in lanes.items():
        while queue:
            mine = queue[0]
            theirs = lanes.get((mine.peer, lane))
            if not theirs or theirs[0].peer != stage:
                break
            other = theirs[0].action
            if other.kind is not _PARTNER[mine.action.kind]:
                break
            if other.microbatch != mine.action.microbatch:
                raise ScheduleError(f"{mine.action} meets {other}: not the same microbatch.")
            done.update((queue.popleft().action, theirs.popleft().action))
            moved = True
    return moved
