"""What a stage holds: what stays, and what it keeps of the microbatches that are under way.

Megatron's estimators know formulas for its own layers. Here the bytes that one microbatch leaves in
each part of a model are measured, and the schedule's table tells how many microbatches there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from goose_strategy.pipeline_parallel.minmax import Load
from goose_strategy.pipeline_parallel.schedule import Kind
from goose_strategy.pipeline_parallel.tables.peaks import peak_by_stage

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.balance import Work
    from goose_strategy.pipeline_parallel.profile import Profile
    from goose_strategy.pipeline_parallel.tables.chunks import Schedule


@dataclass(frozen=True)
class Memory:
    """Bytes of a model's parts, in training.

    Attributes:
        resident: What stays for as long as training does, by part: weights, gradients, the
            optimizer's state.
        profile: What one microbatch leaves in each part.
        recompute: ``"none"``, ``"full"`` or ``"layer"``; named modules count as ``"none"``.
    """

    resident: Work
    profile: Profile
    recompute: str = "none"

    def stays(self, bounds: Sequence[int]) -> list[int]:
        """Return, per stage, the bytes that it holds whatever is under way."""
        resident = self.resident.load(len(bounds) - 1).by_stage(bounds)
        if self.recompute != "layer":
            return resident
        # The layer that is just being computed again.
        saved = [layer.saved for layer in self.profile.layers]
        most = [max(saved[first:end]) for first, end in pairwise(bounds)]
        return [stays + layer for stays, layer in zip(resident, most, strict=True)]

    def activations(self, bounds: Sequence[int]) -> list[int]:
        """Return, per stage, the bytes one microbatch leaves from ``F`` (or ``R``) to ``B``."""
        return self._activations(len(bounds) - 1).by_stage(bounds)

    def inputs(self, stages: int) -> list[int]:
        """Return, per stage, the bytes of a microbatch's inputs from the stage before."""
        return [0] + [self.profile.hidden] * (stages - 1)

    def load(self, schedule: Schedule) -> Load:
        """Return what stages hold at most under a schedule, to be cut by it.

        Several stages of a rank count as if all held the most at one time: an upper bound.

        Args:
            schedule: The schedule, with its recomputes if there are any.
        """
        stages = schedule.chunks.stages
        held, waiting = peak_by_stage(schedule.table), _inputs_held(schedule)
        factors = tuple(held.get(stage, 0) for stage in range(stages))
        kept, inputs = self._activations(stages), self.inputs(stages)
        resident = self.resident.load(stages)
        base = [
            resident.base[s] + factors[s] * kept.base[s] + waiting[s] * inputs[s]
            for s in range(stages)
        ]
        if self.recompute == "layer":
            again = max(layer.saved for layer in self.profile.layers)
            base = [cost + again for cost in base]
        return Load(resident.layers, tuple(base), kept.layers, factors)

    def _activations(self, stages: int) -> Load:
        profile = self.profile
        saved = profile.part("saved")
        if self.recompute == "layer":
            saved = saved._replace(layers=(profile.hidden,) * len(saved.layers))
        load = saved.load(stages)
        return Load(load.layers, tuple(cost + profile.shared for cost in load.base))


def _inputs_held(schedule: Schedule) -> Counter[int]:
    """Return, per stage, of how many microbatches at most it keeps the inputs only."""
    most: Counter[int] = Counter()
    for row in schedule.table:
        again = {(a.stage, a.microbatch) for a in row if a.kind is Kind.RECOMPUTE}
        held: Counter[int] = Counter()
        for action in row:
            if (action.stage, action.microbatch) in again:
                change = {Kind.FORWARD: 1, Kind.RECOMPUTE: -1}
                held[action.stage] += change.get(action.kind, 0)
                most[action.stage] = max(most[action.stage], held[action.stage])
    return most
