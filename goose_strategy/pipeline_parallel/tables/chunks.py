"""Which rank holds which stages, and a schedule as what belongs together.

torch keeps the same facts in dictionaries that each schedule class fills while it runs. A table
alone does not tell where a message goes once a rank holds several stages; with its `Chunks` it
does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations
from goose_strategy.validate import one_of, positive, whole

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.schedule import Action, Table

Style: TypeAlias = Literal["loop", "v"]
"""``loop``: stage ``s`` on rank ``s % ranks``. ``v``: down the ranks, then back up."""


@dataclass(frozen=True)
class Chunks:
    """The stages of every rank. A chunk is a stage, seen from the rank that holds it.

    Attributes:
        ranks: Number of ranks.
        per_rank: Stages per rank.
        style: Where they are; ``"v"`` has two per rank.
    """

    ranks: int
    per_rank: int = 1
    style: Style = "loop"

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: Naming the value and what is allowed.
        """
        whole(ranks=self.ranks, per_rank=self.per_rank)
        positive(ranks=self.ranks, per_rank=self.per_rank)
        one_of(("loop", "v"), style=self.style)
        if self.style == "v" and self.per_rank != 2:
            raise ConfigError(
                f"per_rank={self.per_rank} does not fit style='v', which goes down the ranks once "
                "and up once; choose per_rank=2."
            )

    @property
    def stages(self) -> int:
        """Number of stages of all ranks."""
        return self.ranks * self.per_rank

    def describe(self) -> str:
        """Return the numbers as a user knows them, such as ``"pp=4"``."""
        if self.per_rank == 1:
            return f"pp={self.ranks}"
        return f"pp={self.ranks} x {self.per_rank} stages per rank = {self.stages}"

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The rank of every stage."""
        down = tuple(range(self.ranks))
        return down + down[::-1] if self.style == "v" else down * self.per_rank

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return self.holders[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in increasing order."""
        return tuple(stage for stage, holder in enumerate(self.holders) if holder == rank)

    def is_local(self, stage: int) -> bool:
        """Tell whether ``stage`` and ``stage + 1`` are on one rank, which hands over in memory."""
        return self.holders[stage] == self.holders[stage + 1]


@dataclass(frozen=True)
class Schedule:
    """A table with what is needed to read it.

    Attributes:
        name: What a user calls it.
        chunks: Which rank holds which stages.
        microbatches: Number of microbatches.
        table: One row of actions per rank.
        overlapped: Forwards that may run at the same time as the action behind them, a backward of
            another stage of the rank. Who runs the two in turn is right, too.
    """

    name: str
    chunks: Chunks
    microbatches: int
    table: Table
    overlapped: frozenset[Action] = frozenset()

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Per rank, how many chunks' activations of one microbatch are held at most."""
        return peak_activations(self.table)

    def with_table(self, table: Table) -> Schedule:
        """Return the schedule with another table."""
        return replace(self, table=table)
