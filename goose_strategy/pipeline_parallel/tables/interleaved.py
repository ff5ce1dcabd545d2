"""Schedules over a loop of stages: stage ``s`` on rank ``s % ranks``.

Rank 0 holds stages 0, p, 2p, ...: a microbatch passes each rank several times, in smaller pieces,
and the idle time shrinks by as much. The orders are those of the papers (interleaved 1F1B: arXiv
2104.04473; breadth-first: arXiv 2211.05953; zero bubble: arXiv 2401.10241). Unlike torch's, they
take any number of microbatches, and the breadth-first backward keeps the microbatches' order, so
that gradients are summed as one process sums them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table


def interleaved_1f1b(ranks: int, per_rank: int, microbatches: int) -> Table:
    """Return interleaved 1F1B: depth first, as one forward and one backward in turn.

    Two forwards per rank that follows are run ahead, which hides a message's latency behind one
    action. Rank ``r`` holds ``(per_rank - 1) * round + 2 * (ranks - 1 - r) + 1`` chunks at most,
    where a round is ``ranks`` microbatches if ``ranks`` divides their number.

    Args:
        ranks: Number of ranks.
        per_rank: Stages per rank, >= 2. (With one, this would hold nearly twice the activations of
            :func:`~goose_strategy.pipeline_parallel.schedule.one_f_one_b` for the same time.)
        microbatches: Number of microbatches, any number >= 1.

    Returns:
        The table of ``F`` and ``B`` actions, one row per rank.
    """
    rounds = _rounds(ranks, microbatches)
    rows = []
    for rank in range(ranks):
        forwards, backwards = _depth_first(rank, ranks, per_rank, rounds)
        ahead = (per_rank - 1) * rounds[0] + 2 * (ranks - 1 - rank)
        rows.append(_in_turn(forwards, backwards, ahead, kind=Kind.BACKWARD))
    return tuple(rows)


def looped_bfs(ranks: int, per_rank: int, microbatches: int) -> Table:
    """Return the breadth-first schedule: all microbatches through a stage before the next one.

    Args:
        ranks: Number of ranks.
        per_rank: Stages per rank.
        microbatches: Number of microbatches, any number >= 1.

    Returns:
        The table of ``F`` and ``B`` actions, one row per rank.
    """
    rows = []
    for rank in range(ranks):
        held = range(rank, ranks * per_rank, ranks)
        passes = [(Kind.FORWARD, stage) for stage in held]
        passes += [(Kind.BACKWARD, stage) for stage in reversed(held)]
        rows.append(
            tuple(Action(stage, kind, mb) for kind, stage in passes for mb in range(microbatches))
        )
    return tuple(rows)


def interleaved_zero_bubble(ranks: int, per_rank: int, microbatches: int) -> Table:
    """Return ZB1P: one forward and one ``I`` in turn, and ``W`` where the rank would be idle.

    Rank ``r`` runs its ``W`` actions ``r`` backwards late, so that every rank holds as many
    activations as rank 0 of 1F1B: ``per_rank * ranks`` chunks if ``ranks`` divides
    ``microbatches``. With one stage per rank this is ZB-H1.

    Args:
        ranks: Number of ranks.
        per_rank: Stages per rank, >= 1.
        microbatches: Number of microbatches, any number >= 1.

    Returns:
        The table of ``F``, ``I`` and ``W`` actions, one row per rank.
    """
    rounds = _rounds(ranks, microbatches)
    rows = []
    for rank in range(ranks):
        forwards, backwards = _depth_first(rank, ranks, per_rank, rounds)
        ahead = (per_rank - 1) * rounds[0] + ranks - 1 - rank
        row = _in_turn(forwards, backwards, ahead, kind=Kind.INPUT)
        rows.append(_with_late_weights(row, late=rank))
    return tuple(rows)


def zb_h1(ranks: int, microbatches: int) -> Table:
    """Return ZB-H1: 1F1B with ``W`` in the idle time, at the memory of 1F1B.

    Args:
        ranks: Number of ranks, one stage each.
        microbatches: Number of microbatches, any number >= 1.

    Returns:
        The table of ``F``, ``I`` and ``W`` actions.
    """
    return interleaved_zero_bubble(ranks, 1, microbatches)


def _rounds(ranks: int, microbatches: int) -> list[int]:
    """Cut the microbatches into rounds of at least ``ranks``, as equal as they can be.

    A round passes through all chunks of a rank before the next round. With fewer than ``ranks``
    microbatches in it, the rank would wait for its own result to come around. The larger rounds
    come first: how far a rank runs ahead is counted in the first, and too little would deadlock.
    """
    count = max(1, microbatches // ranks)
    size, more = divmod(microbatches, count)
    return [size + 1] * more + [size] * (count - more)


def _depth_first(
    rank: int, ranks: int, per_rank: int, rounds: Sequence[int]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return (stage, microbatch) of a rank's forwards and of its backwards."""
    held = range(rank, ranks * per_rank, ranks)
    forwards: list[tuple[int, int]] = []
    backwards: list[tuple[int, int]] = []
    start = 0
    for size in rounds:
        chunk = range(start, start + size)
        forwards += [(stage, mb) for stage in held for mb in chunk]
        backwards += [(stage, mb) for stage in reversed(held) for mb in chunk]
        start += size
    return forwards, backwards


def _in_turn(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    ahead: int,
    *,
    kind: Kind,
) -> tuple[Action, ...]:
    """Run ``ahead`` forwards, then a forward and a backward in turn, then the other backwards."""
    ahead = min(ahead, len(forwards))
    runs = [Action(stage, Kind.FORWARD, mb) for stage, mb in forwards]
    returns = [Action(stage, kind, mb) for stage, mb in backwards]
    row = runs[:ahead]
    for forward, backward in zip(runs[ahead:], returns, strict=False):
        row += [forward, backward]
    return (*row, *returns[len(runs) - ahead :])


def _with_late_weights(row: Sequence[Action], *, late: int) -> tuple[Action, ...]:
    """Insert after each ``I`` the ``W`` of the ``I`` that came ``late`` before it."""
    out: list[Action] = []
    waiting: deque[Action] = deque()
    for action in row:
        out.append(action)
        if action.kind is Kind.INPUT:
            waiting.append(action._replace(kind=Kind.WEIGHT))
            if len(waiting) > late:
                out.append(waiting.popleft())
    return (*out, *waiting)
