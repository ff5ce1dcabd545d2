"""Every schedule by its name, made and proved before it is handed out.

The names are torch's where torch has the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table, gpipe, one_f_one_b
from goose_strategy.pipeline_parallel.tables.checks import check_messages, check_schedule
from goose_strategy.pipeline_parallel.tables.chunks import Chunks, Schedule, Style
from goose_strategy.pipeline_parallel.tables.controlled import v_half, v_min
from goose_strategy.pipeline_parallel.tables.insert import add_recompute, add_tie
from goose_strategy.pipeline_parallel.tables.interleaved import (
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    zb_h1,
)
from goose_strategy.pipeline_parallel.tables.lowering import lower
from goose_strategy.pipeline_parallel.tables.vshape import dualpipev, zbv
from goose_strategy.validate import one_of, positive, whole


@dataclass(frozen=True)
class Entry:
    """What is known about a schedule before it is made.

    Attributes:
        make: ``(ranks, per_rank, microbatches) -> table``.
        least: Fewest stages per rank.
        most: Most stages per rank; ``None`` for any number.
        style: Where a rank's stages are.
        splits: Whether it has ``I`` and ``W``, which not every stage can run.
    """

    make: Callable[[int, int, int], Table]
    least: int = 1
    most: int | None = 1
    style: Style = "loop"
    splits: bool = False


def _v(make: Callable[[int, int], Table]) -> Entry:
    return Entry(lambda p, _, m: make(p, m), least=2, most=2, style="v", splits=True)


CATALOGUE: Mapping[str, Entry] = MappingProxyType(
    {
        "GPipe": Entry(lambda p, _, m: gpipe(p, m)),
        "1F1B": Entry(lambda p, _, m: one_f_one_b(p, m)),
        "Interleaved1F1B": Entry(interleaved_1f1b, least=2, most=None),
        "LoopedBFS": Entry(looped_bfs, least=2, most=None),
        "ZBH1": Entry(lambda p, _, m: zb_h1(p, m), splits=True),
        "InterleavedZeroBubble": Entry(interleaved_zero_bubble, least=2, most=None, splits=True),
        "ZBVZeroBubble": _v(zbv),
        "DualPipeV": _v(lambda p, m: dualpipev(p, m)[0]),
        "VHalf": _v(v_half),
        "VMin": _v(v_min),
    }
)
"""All schedules."""


@lru_cache(maxsize=64)
def make_schedule(
    name: str, ranks: int, microbatches: int, *, per_rank: int | None = None, train: bool = True
) -> Schedule:
    """Make and check a schedule.

    Args:
        name: A key of `CATALOGUE`.
        ranks: Number of ranks.
        microbatches: Number of microbatches, any number >= 1.
        per_rank: Stages per rank; the fewest that the schedule takes if ``None``.
        train: With backwards, or only its forwards.

    Returns:
        The schedule. Cached.

    Raises:
        ConfigError: If the name is unknown or a number is not possible.
        ScheduleError: If the table is wrong.
    """
    one_of(CATALOGUE, schedule=name)
    whole(ranks=ranks, microbatches=microbatches)
    positive(ranks=ranks, microbatches=microbatches)
    entry = CATALOGUE[name]
    per_rank = entry.least if per_rank is None else per_rank
    whole(per_rank=per_rank)
    if per_rank < entry.least or (entry.most is not None and per_rank > entry.most):
        allowed = f"{entry.least}" if entry.most == entry.least else f">= {entry.least}"
        raise ConfigError(
            f"per_rank={per_rank} is not possible with schedule={name!r}; choose per_rank "
            f"{allowed}, or another schedule."
        )
    table = entry.make(ranks, per_rank, microbatches)
    overlapped: frozenset[Action] = frozenset()
    if not train:
        table = tuple(tuple(a for a in row if a.kind is Kind.FORWARD) for row in table)
    elif name == "DualPipeV":
        overlapped = dualpipev(ranks, microbatches)[1]
    chunks = Chunks(ranks, per_rank, entry.style)
    schedule = Schedule(name, chunks, microbatches, table, overlapped)
    check_schedule(schedule, train=train)
    return schedule


def forward_only(chunks: Chunks, microbatches: int) -> Table:
    """Return only forwards, for evaluation: all microbatches through a stage before the next one.

    Args:
        chunks: Which rank holds which stages.
        microbatches: Number of microbatches.

    Returns:
        The table of ``F`` actions.
    """
    return tuple(
        tuple(
            Action(stage, Kind.FORWARD, microbatch)
            for stage in chunks.stages_of(rank)
            for microbatch in range(microbatches)
        )
        for rank in range(chunks.ranks)
    )


def finish(
    schedule: Schedule, *, train: bool = True, recompute: bool = False, tie: bool = False
) -> Table:
    """Add everything that is not a schedule's own decision, and prove the result.

    Args:
        schedule: The schedule.
        train: Whether it has backwards.
        recompute: Add ``R`` actions.
        tie: Add ``T`` actions.

    Returns:
        The table with its messages: what an engine executes.

    Raises:
        ScheduleError: If the table is wrong or would deadlock.
    """
    chunks, table = schedule.chunks, schedule.table
    if recompute:
        table = add_recompute(table)
    if tie:
        table = add_tie(table, chunks)
    check_schedule(schedule.with_table(table), train=train)
    lowered = lower(table, chunks)
    check_messages(lowered, chunks)
    return lowered
