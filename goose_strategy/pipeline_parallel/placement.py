"""Which ranks keep which parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.tables.chunks import Chunks

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.stack import StackInfo


@dataclass(frozen=True)
class Slot:
    """One place in the module tree that holds a parameter; tied weights have several.

    Attributes:
        module: Name of the module.
        attribute: Name of the parameter in it.
        parameter: The parameter's first name in the whole model.
    """

    module: str
    attribute: str
    parameter: str


class Placement:
    """For every slot of a model the stages that keep it, and so the ranks.

    A layer's parameters stay with the layer. Any other module's stay where the module is called
    between the first and the last layer of a stage: embeddings on the first, norm and head on the
    last. A module that is replayed on a later stage keeps its parameters there only if the stage's
    outputs depend on it in another way than through what it receives.

    Args:
        model: The whole model.
        info: What the probe found out about it.
        bounds: First layer of every stage, and the number of layers.
        chunks: Which rank holds which stages; one stage per rank if ``None``.

    Raises:
        PlanError: If the model cannot be cut at these bounds.
    """

    def __init__(
        self,
        model: nn.Module,
        info: StackInfo,
        bounds: Sequence[int],
        chunks: Chunks | None = None,
    ) -> None:
        self._info = info
        self._bounds = tuple(bounds)
        self.chunks = chunks or Chunks(max(1, self.num_stages))
        self._check_bounds()
        self._layer_of = {call.name: layer for layer, call in enumerate(info.layers)}
        self._modules = [name for name, _ in model.named_modules()]
        self.slots = _slots(model)
        self._stages = {slot: self._by_call(slot) for slot in self.slots}
        self._add_replayed()
        self._add_unused()
        self._add_first_names()

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self._bounds) - 1

    def missing(self, rank: int) -> dict[str, list[str]]:
        """Return the slots that a rank does not keep, as names of attributes by module."""
        out: dict[str, list[str]] = {}
        for slot, stages in self._stages.items():
            if rank not in self._ranks(stages):
                out.setdefault(slot.module, []).append(slot.attribute)
        return out

    def shared(self) -> dict[str, tuple[int, ...]]:
        """Return the parameters that more than one rank keeps, with these ranks in order.

        Raises:
            PlanError: If one is on other ranks than the first and the last.
        """
        stages_of: dict[str, set[int]] = {}
        for slot, stages in self._stages.items():
            stages_of.setdefault(slot.parameter, set()).update(stages)
        ends = (0, self.chunks.ranks - 1)
        shared: dict[str, tuple[int, ...]] = {}
        for name, on in stages_of.items():
            ranks = tuple(sorted(self._ranks(on)))
            if len(ranks) > 1 and ranks != ends:
                raise PlanError(
                    f"{name} is used on the stages {sorted(on)}; a weight can be shared by the "
                    "first and the last rank of the pipeline only. Choose another partition.",
                    axis="pp",
                )
            if len(ranks) > 1:
                shared[name] = ranks
        return shared

    def local_name(self, parameter: str, rank: int) -> str:
        """Return the name under which a rank has a parameter that it keeps."""
        return next(
            f"{slot.module}.{slot.attribute}" if slot.module else slot.attribute
            for slot, stages in self._stages.items()
            if slot.parameter == parameter and rank in self._ranks(stages)
        )

    def stage_of(self, rank: int) -> dict[str, int]:
        """Return the stage of each parameter of a rank, by the name that the rank has for it.

        Parameters that several stages of the rank use, such as an embedding that is the head's
        weight, too, are left out.
        """
        stages_of: dict[str, set[int]] = {}
        for slot, stages in self._stages.items():
            here = {stage for stage in stages if self.chunks.rank_of(stage) == rank}
            stages_of.setdefault(slot.parameter, set()).update(here)
        return {
            self.local_name(name, rank): min(stages)
            for name, stages in stages_of.items()
            if len(stages) == 1
        }

    def _ranks(self, stages: Iterable[int]) -> set[int]:
        return {self.chunks.rank_of(stage) for stage in stages}

    def _check_bounds(self) -> None:
        bounds, layers = self._bounds, self._info.num_layers
        rising = all(a < b for a, b in itertools.pairwise(bounds))
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != layers or not rising:
            raise PlanError(
                f"bounds={list(bounds)} must rise from 0 to the number of layers, {layers}.",
                axis="pp",
            )
        if self.chunks.stages != self.num_stages:
            raise PlanError(
                f"bounds={list(bounds)} give {self.num_stages} stages, {self.chunks.ranks} ranks "
                f"with {self.chunks.per_rank} stages each need {self.chunks.stages}.",
                axis="pp",
            )
        for first, end in itertools.pairwise(bounds):
            self._info.check_stage(first, end)

    def _range(self, stage: int) -> range:
        return range(self._bounds[stage], self._bounds[stage + 1])

    def _by_call(self, slot: Slot) -> set[int]:
        layer = self._layer(slot.module)
        if layer is not None:
            return {stage for stage in range(self.num_stages) if layer in self._range(stage)}
        calls = self._info.segments.get(slot.module, frozenset())
        return {
            stage
            for stage in range(self.num_stages)
            # A call is counted by the layers called before it.
            if any(self._bounds[stage] < max(call, 1) <= self._bounds[stage + 1] for call in calls)
        }

    def _add_replayed(self) -> None:
        for stage in range(self.num_stages):
            reached = self._info.reached(self._bounds[stage], self._bounds[stage + 1])
            kept = {slot.parameter for slot, stages in self._stages.items() if stage in stages}
            for slot, stages in self._stages.items():
                if slot.parameter in reached - kept and self._layer(slot.module) is None:
                    stages.add(stage)

    def _add_unused(self) -> None:
        """Give what the probe never saw used to the first stage, or, behind the stack, the last."""
        kept = {slot.parameter for slot, stages in self._stages.items() if stages}
        stack = self._modules.index(self._info.stack)
        for slot, stages in self._stages.items():
            if slot.parameter not in kept:
                behind = self._modules.index(slot.module) > stack
                stages.add(self.num_stages - 1 if behind else 0)

    def _add_first_names(self) -> None:
        """Let the first stage that has a parameter have it under the name it has in the model."""
        owners: dict[str, int] = {}
        for slot, stages in self._stages.items():
            if stages:
                owner = min(stages)
                owners[slot.parameter] = min(owners.get(slot.parameter, owner), owner)
        named: set[str] = set()
        for slot, stages in self._stages.items():
            if slot.parameter not in named:
                named.add(slot.parameter)
                stages.add(owners[slot.parameter])

    def _layer(self, module: str) -> int | None:
        parts = module.split(".")
        depth = self._info.stack.count(".") + 2
        return self._layer_of.get(".".join(parts[:depth]))


def _slots(model: nn.Module) -> list[Slot]:
    first_names = {id(param): name for name, param in model.named_parameters()}
    return [
        Slot(module=name, attribute=attribute, parameter=first_names[id(param)])
        for name, module in model.named_modules()
        for attribute, param in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
