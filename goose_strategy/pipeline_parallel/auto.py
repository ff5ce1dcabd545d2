"""``schedule="auto"``: every schedule that a model can run, on paper, at measured costs.

No other engine chooses its schedule. Which one is best depends on the head's share of the work, on
what weight gradients cost and on the memory, and each schedule has its own best cut of the layers.
A pure function of a profile: one rank calls it and tells the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.partition import partition_layers
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE, make_schedule
from goose_strategy.pipeline_parallel.tables.choose import Choice, choose
from goose_strategy.pipeline_parallel.tables.insert import add_recompute
from goose_strategy.pipeline_parallel.tables.simulate import Costs

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.memory import Memory
    from goose_strategy.pipeline_parallel.minmax import Bounds
    from goose_strategy.pipeline_parallel.tables.chunks import Schedule

MOST_PER_RANK = 4
"""More stages per rank are tried only if they are asked for: messages eat what they gain."""
_LATENCY_NS = 20_000
_NS_PER_BYTE = 1 / 8
"""A message between ranks: 20 us and 8 GB/s. To measure it, all ranks would have to take part."""


@dataclass(frozen=True)
class Question:
    """What a schedule is chosen for.

    Attributes:
        memory: What each part of the model takes, in bytes and in nanoseconds.
        ranks: Number of ranks of the pipeline.
        microbatches: Number of microbatches.
        partition: How layers are shared out: ``"balanced"`` and ``"time"`` by their measured times,
            ``"memory"``, ``"uniform"``, or the number of layers of each stage.
        names: Schedules that may be chosen.
        stages_per_rank: Only schedules with as many; any if ``None``.
        memory_limit: Bytes that a rank may hold; no limit if ``None``.
    """

    memory: Memory
    ranks: int
    microbatches: int
    partition: str | Sequence[int] = "balanced"
    names: Collection[str] = tuple(CATALOGUE)
    stages_per_rank: int | None = None
    memory_limit: int | None = None

    def candidates(self) -> list[Schedule]:
        """Return the schedules that the model has layers enough for.

        Raises:
            PlanError: If there is none.
        """
        found: list[Schedule] = []
        layers = len(self.memory.profile.layers)
        for name in self.names:
            entry = CATALOGUE[name]
            most = entry.most or max(self.stages_per_rank or 0, MOST_PER_RANK)
            for per_rank in range(entry.least, min(most, layers // self.ranks) + 1):
                stages = per_rank * self.ranks
                listed = isinstance(self.partition, str) or len(self.partition) == stages
                if listed and self.stages_per_rank in (None, per_rank):
                    found.append(self._made(name, per_rank))
        if not found:
            raise PlanError(
                f"schedule='auto' finds no schedule for pp={self.ranks}, stages_per_rank="
                f"{self.stages_per_rank}, partition={self.partition!r} and a model of {layers} "
                f"layers; choose pp <= {layers}, leave stages_per_rank=None, or list as many "
                "stages as a schedule has.",
                axis="pp",
            )
        return found

    def _made(self, name: str, per_rank: int) -> Schedule:
        schedule = make_schedule(name, self.ranks, self.microbatches, per_rank=per_rank)
        if self.memory.recompute == "full":
            return schedule.with_table(add_recompute(schedule.table))
        return schedule

    def cut(self, schedule: Schedule) -> Bounds:
        """Return the best cut for a schedule."""
        memory = self.memory
        if self.partition == "memory":
            return partition_layers("memory", memory.load(schedule), schedule.chunks)
        return partition_layers(self.partition, memory.profile.work(), schedule.chunks)


def choose_schedule(question: Question) -> Choice:
    """Simulate every candidate, cut as is best for it, and choose the fastest that fits.

    Args:
        question: The model and the settings.

    Returns:
        The best candidate and the figures of all, in nanoseconds and bytes.

    Raises:
        PlanError: If the model has layers for no schedule, or none fits into the memory.
    """

    def costs(schedule: Schedule) -> Costs:
        return stage_costs(question.memory, question.cut(schedule))

    return choose(question.candidates(), costs, question.memory_limit)


def stage_costs(memory: Memory, bounds: Sequence[int]) -> Costs:
    """Return the costs of every stage's actions, in nanoseconds and bytes.

    Args:
        memory: What each part of the model takes.
        bounds: First layer of every stage, and the number of layers.
    """
    profile, stages = memory.profile, len(bounds) - 1

    def by_stage(name: str) -> tuple[int, ...]:
        return tuple(profile.part(name).load(stages).by_stage(bounds))

    back = by_stage("backward_input")
    if memory.recompute == "layer":
        again = profile.part("forward")._replace(before=0, after=0).load(stages).by_stage(bounds)
        back = tuple(own + more for own, more in zip(back, again, strict=True))
    return Costs(
        forward=by_stage("forward"),
        backward_input=back,
        backward_weight=by_stage("backward_weight"),
        latency=_LATENCY_NS + _NS_PER_BYTE * profile.hidden,
        activations=tuple(memory.activations(bounds)),
        inputs=tuple(memory.inputs(stages)),
        resident=tuple(memory.stays(bounds)),
    )
