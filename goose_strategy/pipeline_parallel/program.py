"""From a schedule to what a stage executes: the table with its messages, proved not to hang.

Here are the tables of one stage per rank, which the engine runs, and what it looks up in them.
Every one has passed the checks of :mod:`goose_strategy.pipeline_parallel.tables.checks` before any
rank runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from goose_strategy.pipeline_parallel.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Table,
    forward_only,
)
from goose_strategy.pipeline_parallel.tables.checks import check_messages, check_table
from goose_strategy.pipeline_parallel.tables.insert import add_recompute
from goose_strategy.validate import one_of, positive


@lru_cache(maxsize=64)
def program(
    schedule: str, stages: int, microbatches: int, *, train: bool = True, recompute: bool = False
) -> Table:
    """Return the checked table of a schedule with its messages: what the engine executes.

    Args:
        schedule: A key of `SCHEDULES`; unused for ``train=False``.
        stages: Number of stages.
        microbatches: Number of microbatches.
        train: With backwards, or only forwards.
        recompute: With ``R`` actions. The messages stay where they are without.

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
    check_table(add_recompute(table) if recompute else table, microbatches, train=train)
    lowered = add_messages(table)
    if recompute:
        lowered = add_recompute(lowered)
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
        recomputed: Microbatches whose forward keeps no graph, because an ``R`` makes it.
    """

    actions: tuple[Action, ...]
    last_backward: Action | None
    taken: Mapping[Action, tuple[Action, ...]]
    recomputed: frozenset[int] = frozenset()


@lru_cache(maxsize=64)
def stage_program(
    schedule: str,
    stages: int,
    microbatches: int,
    *,
    train: bool,
    stage: int,
    recompute: bool = False,
) -> StageProgram:
    """Return the row of one stage of :func:`program`, with what the engine looks up in it.

    Args:
        schedule: A key of ``SCHEDULES``.
        stages: Number of stages.
        microbatches: Number of microbatches.
        train: With backwards, or only forwards.
        stage: Number of the stage.
        recompute: With ``R`` actions.

    Returns:
        The stage's part. Cached.
    """
    table = program(schedule, stages, microbatches, train=train, recompute=recompute)
    backwards = [action for action in table[stage] if action.kind is Kind.BACKWARD]
    # The gradients of a microbatch say that its hidden states arrived.
    taken: dict[Action, tuple[Action, ...]] = {}
    taken |= {b: (b._replace(kind=Kind.SEND_FORWARD),) for b in backwards if stage < stages - 1}
    if stage > 0:
        taken |= _gradients_taken(table[stage - 1], stage)
    again = frozenset(a.microbatch for a in table[stage] if a.kind is Kind.RECOMPUTE)
    return StageProgram(table[stage], backwards[-1] if backwards else None, taken, again)


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
        table: The table; one stage per row. (Several, or a split backward:
            :func:`goose_strategy.pipeline_parallel.tables.lowering.lower`.)

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
