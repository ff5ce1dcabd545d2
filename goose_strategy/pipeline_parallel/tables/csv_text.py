"""Schedules as CSV in torch's format, so that a schedule can come from a file or another tool.

One line per rank, one action per cell, empty cells for idle time:
``0F0,0F1,,(0F2;3B0)OVERLAP_F_B``. torch reads what is written here
(``_PipelineScheduleRuntime._load_csv``, ``compute_only``) but for ``R`` and ``T``, and what torch
writes is read here. Messages are refused: they follow from the computations.
"""

from __future__ import annotations

import csv
import io
import re

from goose_strategy.errors import ConfigError, ScheduleError
from goose_strategy.pipeline_parallel.schedule import MESSAGES, Action, Kind, Table
from goose_strategy.pipeline_parallel.tables.checks import check_schedule
from goose_strategy.pipeline_parallel.tables.chunks import Chunks, Schedule

_BACKWARDS = (Kind.BACKWARD, Kind.INPUT)
_PAIR = re.compile(r"\((?P<first>[^;()]*);(?P<second>[^;()]*)\)OVERLAP_F_B")


def write_csv(schedule: Schedule) -> str:
    """Return a schedule as CSV; forwards that may overlap with what follows as pairs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in schedule.table:
        cells: list[str] = []
        actions = iter(row)
        for action in actions:
            partner = next(actions, None) if action in schedule.overlapped else None
            if partner is None or partner.kind not in _BACKWARDS:
                # A recompute may have come between the two.
                cells += [str(one) for one in (action, partner) if one is not None]
            else:
                cells.append(f"({action};{partner})OVERLAP_F_B")
        writer.writerow(cells)
    return out.getvalue()


def read_csv(text: str, *, name: str = "CSV", train: bool = True) -> Schedule:
    """Read a schedule and check it.

    Args:
        text: The content of the file.
        name: What the schedule is called, in messages too; its path, for example.
        train: Whether backwards belong to it.

    Returns:
        The schedule; where its stages are is taken from the rows.

    Raises:
        ConfigError: Naming the line and the cell that is no action, the stage that is not where a
            loop or a V has it, or the action that is wrong in its place.
    """
    overlapped: set[Action] = set()
    rows = []
    for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        row: list[Action] = []
        for cell in cells:
            try:
                row += _parse(cell.strip(), overlapped)
            except ScheduleError as error:
                raise ConfigError(f"{name}, line {line}: {error}") from error
        rows.append(tuple(row))
    table = tuple(rows)
    actions = [action for row in table for action in row]
    if not actions:
        raise ConfigError(f"{name} has no actions; one line per rank is needed, such as 0F0,0B0.")
    microbatches = 1 + max(action.microbatch for action in actions)
    schedule = Schedule(name, _chunks(table, name), microbatches, table, frozenset(overlapped))
    try:
        check_schedule(schedule, train=train)
    except ScheduleError as error:
        raise ConfigError(str(error)) from error
    return schedule


def _parse(cell: str, overlapped: set[Action]) -> list[Action]:
    if not cell:
        return []
    pair = _PAIR.fullmatch(cell)
    texts = (pair["first"], pair["second"]) if pair else (cell,)
    actions = [Action.parse(text.strip()) for text in texts]
    for action in actions:
        if action.kind in MESSAGES:
            raise ScheduleError(f"{action} is a message; leave messages out, they are inserted.")
    if pair:
        forward, backward = actions
        if forward.kind is not Kind.FORWARD or backward.kind not in _BACKWARDS:
            raise ScheduleError(f"{cell} must overlap an F with a B or I, in this order.")
        overlapped.add(forward)
    return actions


def _chunks(table: Table, name: str) -> Chunks:
    """Find out which rank holds which stages."""
    holders = {action.stage: rank for rank, row in enumerate(table) for action in row}
    ranks, stages = len(table), 1 + max(holders)
    per_rank, rest = divmod(stages, ranks)
    if rest:
        raise ConfigError(
            f"{name} has {stages} stages on {ranks} ranks; every rank needs the same number."
        )
    candidates = [Chunks(ranks, per_rank)]
    if per_rank == 2:
        candidates.append(Chunks(ranks, 2, "v"))
    for chunks in candidates:
        if all(chunks.rank_of(stage) == rank for stage, rank in holders.items()):
            return chunks
    wrong = next(s for s, rank in sorted(holders.items()) if candidates[0].rank_of(s) != rank)
    raise ConfigError(
        f"{name} has stage {wrong} on rank {holders[wrong]}; stage s belongs on rank s % {ranks} "
        f"(a loop)"
        + (f", or on rank {2 * ranks - 1} - s from s = {ranks} on (a V)." if per_rank == 2 else ".")
    )
