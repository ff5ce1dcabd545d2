"""Sends and receives for tables with any number of stages per rank.

torch posts a receive where the sender's action stands in a simulation without times; a receive is
then often posted late, or long before its message. Here both ends come from one clock.

There are two communicators, forward and backward, however many stages a rank holds. In a loop over
two ranks both directions of both kinds run between the same two ranks, and in a V each rank sends
forwards up and down; a communicator works through its operations in order, so the ends must agree
on one order. They do by construction: all messages of all ranks are sorted by the time at which
the sender has computed them, and every rank launches its own in that order. Then nothing can
deadlock: of the messages under way the first in that order waits for no other one. It would
hold with one communicator, and with one per pair of neighbours, too: fewer wait for more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table
from goose_strategy.pipeline_parallel.tables.simulate import Span, time_table

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks


class _Key(NamedTuple):
    """The place of a message in the one order of all messages.

    Attributes:
        time: When the sender has computed it.
        backward: Outputs come before gradients of the same time.
        way: Sending stages on its way so far: of two messages of the same time a rank receives the
            one first, and sends the other then.
        microbatch: Its microbatch.
    """

    time: float
    backward: bool
    way: int
    microbatch: int


def lower(table: Table, chunks: Chunks) -> Table:
    """Insert sends and receives.

    A send follows its action at once. A receive is posted before the action during which its
    message is computed, if that keeps the one order of all messages, else behind the send of that
    action; so it is there when the message is, and its buffer not much earlier. The receive of a
    gradient stands behind the stage's own forward, which knows its shapes, and before the ``R`` of
    its backward, which runs while the message travels. Stages of one rank hand over in memory.

    Args:
        table: A checked table, one row per rank, without messages.
        chunks: Which rank holds which stages.

    Returns:
        The table with ``SEND_*`` and ``RECV_*`` actions.

    Raises:
        ScheduleError: If the table cannot be executed to its end.
    """
    timeline = time_table(table, chunks, _unit_cost, 0.0)
    receives: list[list[tuple[_Key, Action]]] = [[] for _ in table]
    for row in timeline:
        for span in row:
            message = _message(span, chunks)
            if message is not None:
                key, _, receive = message
                receives[chunks.rank_of(receive.stage)].append((key, receive))
    return tuple(
        tuple(_with_messages(row, sorted(mine), chunks))
        for row, mine in zip(timeline, receives, strict=True)
    )


def _unit_cost(action: Action) -> float:
    # R and T send nothing; without a time of their own they do not shift the order of messages.
    costs = {Kind.BACKWARD: 2.0, Kind.RECOMPUTE: 0.0, Kind.TIE: 0.0}
    return costs.get(action.kind, 1.0)


def _message(span: Span, chunks: Chunks) -> tuple[_Key, Action, Action] | None:
    """Return the send of an action's result and its receive; ``None`` if nothing is sent."""
    stage, kind, microbatch = span.action
    if kind is Kind.FORWARD and stage < chunks.stages - 1 and not chunks.is_local(stage):
        send, receive = Kind.SEND_FORWARD, Action(stage + 1, Kind.RECEIVE_FORWARD, microbatch)
    elif kind in (Kind.BACKWARD, Kind.INPUT) and stage > 0 and not chunks.is_local(stage - 1):
        send, receive = Kind.SEND_BACKWARD, Action(stage - 1, Kind.RECEIVE_BACKWARD, microbatch)
    else:
        return None
    way = stage if kind is Kind.FORWARD else chunks.stages - 1 - stage
    key = _Key(span.end, kind is not Kind.FORWARD, way, microbatch)
    return key, Action(stage, send, microbatch), receive


def _with_messages(
    row: Sequence[Span], receives: Sequence[tuple[_Key, Action]], chunks: Chunks
) -> Iterator[Action]:
    position = 0
    recompute: Action | None = None
    for span in row:
        if span.action.kind is Kind.RECOMPUTE:
            # It stays next to its backward, behind the receives.
            recompute = span.action
            continue
        if span.action.kind is Kind.TIE:
            yield span.action
            continue
        message = _message(span, chunks)
        until = message[0] if message else _Key(span.end, True, chunks.stages, 0)  # noqa: FBT003
        while position < len(receives) and receives[position][0] < until:
            yield receives[position][1]
            position += 1
        if recompute is not None:
            yield recompute
            recompute = None
        yield span.action
        if message:
            yield message[1]
