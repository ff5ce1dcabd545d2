"""What is added to a finished table: recomputes, and the sum of a tied weight's gradients.

torch has neither. Its checkpoints are recomputed inside of the backward, which starts only when
the gradient has come; as an action of its own, the recompute fills the time in which the rank
waits for it.
"""

from __future__ import annotations

from goose_strategy.pipeline_parallel.schedule import MESSAGES, Action, Kind, Table
from goose_strategy.pipeline_parallel.tables.chunks import Chunks


def add_recompute(table: Table) -> Table:
    """Insert an ``R`` right before each ``B`` or ``I`` that does not follow its own ``F`` at once.

    Where it does, the rank computes nothing in between, so nothing would be saved: on the last
    stage in most schedules, but not in GPipe, and on every stage with one microbatch. At most one
    ``R`` of a stage waits for its backward. Where the backward is split, what ``R`` made is kept
    until ``W``, which needs no second one.

    Args:
        table: A table with or without messages. With them, the receive of the gradient stands
            before the ``R``: it can be issued after the receive is posted, before it is awaited.

    Returns:
        The table with ``R`` actions.
    """
    rows = []
    for row in table:
        out: list[Action] = []
        computed: Action | None = None
        for action in row:
            forward = action._replace(kind=Kind.FORWARD)
            if action.kind in (Kind.BACKWARD, Kind.INPUT) and computed != forward:
                out.append(action._replace(kind=Kind.RECOMPUTE))
            out.append(action)
            if action.kind not in (*MESSAGES, Kind.TIE):
                computed = action
        rows.append(tuple(out))
    return tuple(rows)


def add_tie(table: Table, chunks: Chunks | None = None) -> Table:
    """Insert a ``T`` after the last ``B`` or ``W`` of the first and of the last stage.

    From there on the stage's gradients are complete, so the two ranks can sum those of a weight
    that both stages use. ``T`` starts the exchange, on a communicator of its own; nobody waits for
    it before the end of the row, because the other end may come to it much later. Where one rank
    holds both stages nothing is to be sent, and the table is returned as it is.

    Args:
        table: A table with backwards, with or without messages.
        chunks: Which rank holds which stages; one stage per rank if ``None``.

    Returns:
        The table with two ``T`` actions, or none.
    """
    chunks = chunks or Chunks(len(table))
    ends = (0, chunks.stages - 1)
    if chunks.rank_of(ends[0]) == chunks.rank_of(ends[1]):
        return table
    rows = [list(row) for row in table]
    for stage in ends:
        row = rows[chunks.rank_of(stage)]
        weights = (Kind.BACKWARD, Kind.WEIGHT)
        done = [i for i, a in enumerate(row) if a.stage == stage and a.kind in weights]
        if done:
            at = done[-1] + 1
            # Whoever waits for the gradient comes first.
            at += at < len(row) and row[at].kind is Kind.SEND_BACKWARD
            row.insert(at, Action(stage, Kind.TIE, 0))
    return tuple(tuple(row) for row in rows)
