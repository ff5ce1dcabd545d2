"""What each rank executes: the row of a schedule's table with its messages.

torch inserts sends and receives while its runtime is set up, one schedule class at a time. Here
the whole program of every rank is a pure function of the settings and the number of microbatches:
every rank makes it for itself, and :mod:`~goose_strategy.pipeline_parallel.tables.checks` proves
that it cannot hang before any rank runs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from goose_strategy.errors import BatchError, ConfigError
from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table
from goose_strategy.pipeline_parallel.tables.catalogue import (
    CATALOGUE,
    finish,
    forward_only,
    make_schedule,
)
from goose_strategy.pipeline_parallel.tables.chunks import Chunks, Schedule
from goose_strategy.pipeline_parallel.tables.csv_text import read_csv
from goose_strategy.validate import whole

if TYPE_CHECKING:
    from collections.abc import Iterable

    from goose_strategy.pipeline_parallel.tables.norms import Norms

_WHOLE = (Kind.BACKWARD, Kind.INPUT)


def is_file(schedule: str) -> bool:
    """Tell whether a schedule is named by the file that holds it."""
    return schedule.endswith(".csv")


@lru_cache(maxsize=16)
def read_schedule(path: str) -> Schedule:
    """Read a schedule from a file in torch's CSV format. Cached: a run reads it once.

    Args:
        path: The file.

    Returns:
        The schedule, checked.

    Raises:
        ConfigError: If it cannot be read, or is no schedule; names the line and the action.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"schedule={path!r} cannot be read: {error}; name one of {', '.join(CATALOGUE)}, or a "
            "CSV file in torch's format."
        ) from error
    schedule = read_csv(text, name=path)
    for action in (action for row in schedule.table for action in row):
        if action.kind in (Kind.RECOMPUTE, Kind.TIE):
            raise ConfigError(
                f"schedule={path!r} has {action}; leave R and T out, recompute='full' and tied "
                "weights add what is needed."
            )
    return schedule


def fingerprint(schedule: str) -> str:
    """Return what is equal on two ranks only if a schedule is: its name, or what its file says."""
    return str(read_schedule(schedule).table) if is_file(schedule) else schedule


def chunks_of(schedule: str, ranks: int, stages_per_rank: int | None = None) -> Chunks:
    """Return which rank holds which stages under a schedule.

    Args:
        schedule: A key of `CATALOGUE` or the path of a CSV file.
        ranks: Number of ranks of the pipeline.
        stages_per_rank: As many as are wanted; the fewest that the schedule takes if ``None``.

    Returns:
        The stages of every rank.

    Raises:
        ConfigError: If the schedule is unknown or is not for these numbers.
    """
    if stages_per_rank is not None:
        whole(stages_per_rank=stages_per_rank)
    if is_file(schedule):
        chunks = read_schedule(schedule).chunks
        for name, wanted, given in (
            ("pp", ranks, chunks.ranks),
            ("stages_per_rank", stages_per_rank, chunks.per_rank),
        ):
            if wanted not in (None, given):
                raise ConfigError(
                    f"{name}={wanted} does not fit schedule={schedule!r}, which is for "
                    f"{name}={given}."
                )
        return chunks
    if schedule not in CATALOGUE:
        named = ", ".join(repr(name) for name in CATALOGUE)
        raise ConfigError(
            f"schedule={schedule!r} is not known; choose one of {named}, 'auto', or the path of a "
            ".csv file."
        )
    entry = CATALOGUE[schedule]
    per_rank = entry.least if stages_per_rank is None else stages_per_rank
    if per_rank < entry.least or (entry.most is not None and per_rank > entry.most):
        allowed = f"{entry.least}" if entry.most == entry.least else f">= {entry.least}"
        raise ConfigError(
            f"stages_per_rank={per_rank} is not possible with schedule={schedule!r}; choose "
            f"stages_per_rank {allowed}, or another schedule."
        )
    return Chunks(ranks, per_rank, entry.style)


def splits_backward(schedule: str) -> bool:
    """Tell whether a schedule has ``I`` and ``W``.

    Args:
        schedule: A key of `CATALOGUE` or the path of a CSV file.
    """
    if is_file(schedule):
        return any(a.kind is Kind.WEIGHT for row in read_schedule(schedule).table for a in row)
    return CATALOGUE[schedule].splits


@lru_cache(maxsize=64)
def program(
    schedule: str,
    chunks: Chunks | int,
    microbatches: int,
    *,
    train: bool = True,
    recompute: bool = False,
    norms: Norms | None = None,
) -> Table:
    """Return the checked table of a schedule with its messages: what the engines execute.

    Args:
        schedule: A key of `CATALOGUE` or the path of a CSV file.
        chunks: Which rank holds which stages; a number of ranks stands for the fewest stages.
        microbatches: Number of microbatches.
        train: With backwards, or only forwards.
        recompute: With ``R`` actions.
        norms: For what weight gradients wait, where they are clipped per sample.

    Returns:
        Per rank its actions, messages included. Cached: a run makes it once.

    Raises:
        BatchError: If a file is for another number of microbatches.
        ConfigError: If the schedule is unknown or a number is not possible.
        ScheduleError: If the table is incomplete or would deadlock.
    """
    if isinstance(chunks, int):
        chunks = chunks_of(schedule, chunks)
    made = schedule_of(schedule, chunks, microbatches, train=train)
    return finish(made, train=train, recompute=recompute, norms=norms)


def schedule_of(
    schedule: str, chunks: Chunks, microbatches: int, *, train: bool = True
) -> Schedule:
    """Return a schedule without its messages and recomputes.

    Args:
        schedule: A key of `CATALOGUE` or the path of a CSV file.
        chunks: Which rank holds which stages.
        microbatches: Number of microbatches.
        train: With backwards, or only forwards.

    Raises:
        BatchError: If a file is for another number of microbatches.
    """
    if not is_file(schedule):
        per_rank = chunks.per_rank
        return make_schedule(schedule, chunks.ranks, microbatches, per_rank=per_rank, train=train)
    if not train:
        return Schedule(schedule, chunks, microbatches, forward_only(chunks, microbatches))
    made = read_schedule(schedule)
    if made.microbatches != microbatches:
        raise BatchError(
            f"schedule={schedule!r} is for {made.microbatches} microbatches, but the batch gives "
            f"{microbatches}; pass a batch of at least {made.microbatches} rows, or as many "
            "microbatches."
        )
    return made


@dataclass(frozen=True)
class RankProgram:
    """What one rank executes.

    Attributes:
        actions: Its row, messages included.
        completes: The actions after which all gradients of their stage that they touch are
            complete: a stage's last ``B``, or its last ``I`` and its last ``W``.
        taken: For an action that waits for a neighbour's message, the rank's own sends that this
            neighbour must have taken before it sent that message. To wait for them then costs
            nothing, and their tensors can be freed.
        recomputed: Stages and microbatches whose forward keeps no graph, because an ``R`` makes it.
    """

    actions: tuple[Action, ...]
    completes: frozenset[Action]
    taken: Mapping[Action, tuple[Action, ...]]
    recomputed: frozenset[tuple[int, int]] = frozenset()


@lru_cache(maxsize=64)
def rank_program(  # noqa: PLR0913  what makes a program, and whose row of it
    schedule: str,
    chunks: Chunks | int,
    microbatches: int,
    *,
    train: bool,
    rank: int,
    recompute: bool = False,
    norms: Norms | None = None,
) -> RankProgram:
    """Return the row of one rank of :func:`program`, with what the engine looks up in it.

    Args:
        schedule: A key of `CATALOGUE` or the path of a CSV file.
        chunks: As in :func:`program`.
        microbatches: Number of microbatches.
        train: With backwards, or only forwards.
        rank: Number of the rank in the pipeline.
        recompute: With ``R`` actions.
        norms: As in :func:`program`.

    Returns:
        The rank's part. Cached.
    """
    if isinstance(chunks, int):
        chunks = chunks_of(schedule, chunks)
    table = program(schedule, chunks, microbatches, train=train, recompute=recompute, norms=norms)
    row = table[rank]
    taken: dict[Action, tuple[Action, ...]] = {}
    for other in set(range(chunks.ranks)) - {rank}:
        taken |= _taken(table[other], chunks, rank, set(row))
    again = frozenset((a.stage, a.microbatch) for a in row if a.kind is Kind.RECOMPUTE)
    return RankProgram(row, _completing(row), taken, again)


def _completing(row: Iterable[Action]) -> frozenset[Action]:
    """Return a stage's last backward and its last ``W``."""
    last: dict[tuple[int, bool], Action] = {}
    for action in row:
        if action.kind in (*_WHOLE, Kind.WEIGHT):
            last[action.stage, action.kind is Kind.WEIGHT] = action
            # A whole backward completes the weights, too.
            if action.kind is Kind.BACKWARD:
                last.pop((action.stage, True), None)
    return frozenset(last.values())


def _taken(
    theirs: Iterable[Action], chunks: Chunks, rank: int, mine: set[Action]
) -> dict[Action, tuple[Action, ...]]:
    """Return which sends another rank had taken before each of its messages to ``rank``."""
    taken: dict[Action, tuple[Action, ...]] = {}
    since: list[Action] = []
    last = chunks.stages - 1
    for stage, kind, microbatch in theirs:
        if kind is Kind.FORWARD and stage > 0 and chunks.rank_of(stage - 1) == rank:
            since.append(Action(stage - 1, Kind.SEND_FORWARD, microbatch))
        elif kind in _WHOLE and stage < last and chunks.rank_of(stage + 1) == rank:
            since.append(Action(stage + 1, Kind.SEND_BACKWARD, microbatch))
        waiting: Action | None = None
        if kind is Kind.SEND_FORWARD and chunks.rank_of(stage + 1) == rank:
            waiting = Action(stage + 1, Kind.FORWARD, microbatch)
        elif kind is Kind.SEND_BACKWARD and chunks.rank_of(stage - 1) == rank:
            whole_backward = Action(stage - 1, Kind.BACKWARD, microbatch)
            split = whole_backward._replace(kind=Kind.INPUT)
            waiting = whole_backward if whole_backward in mine else split
        if waiting is not None and since:
            taken[waiting], since = tuple(since), []
    return taken
