"""Stages of equal work: what each layer costs, counted.

torch's pipelining cuts where it is told to, Megatron by number of layers. Behind the last layer
comes the head, in a small model with a large vocabulary as much work as three layers, and a
pipeline is as fast as its slowest stage.

Work is counted, not measured: a token costs each matrix's elements in multiplications, whatever
the device. Attention between tokens is left out, as its share depends on the length of the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from goose_strategy.pipeline_parallel.minmax import Load

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.stack import StackInfo
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks


class Work(NamedTuple):
    """What each part of a model costs in one unit: multiplications per token, or time.

    Attributes:
        before: Of what comes before the first layer.
        layers: Of each layer.
        after: Of what comes after the last layer, the head among it.
    """

    before: int
    layers: tuple[int, ...]
    after: int

    def load(self, stages: int) -> Load:
        """Return it as what some stages cost: the first one has the front, the last the head."""
        base = [0] * stages
        base[0] += self.before
        base[-1] += self.after
        return Load(self.layers, tuple(base))


def count_work(model: nn.Module, info: StackInfo) -> Work:
    """Count the work of every layer and of what is around them.

    Args:
        model: The whole model, on any device.
        info: Where its layers are.

    Returns:
        The work; the same on every rank that asks.
    """
    active = _active_share(model)
    layers = tuple(_matrices(model.get_submodule(call.name), active) for call in info.layers)
    before = after = 0
    for name, calls in info.segments.items():
        module = model.get_submodule(name)
        # Looking rows up multiplies nothing.
        if isinstance(module, nn.Embedding):
            continue
        own = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim > 1)
        before += own * (0 in calls)
        after += own * (info.num_layers in calls)
    return Work(before, layers, after)


class Parts(NamedTuple):
    """The parameters of each part of a model; one that is tied may be in two parts.

    Attributes:
        before: Of the modules that are called before the first layer.
        layers: Of each layer.
        after: Of the modules that are called after the last layer.
    """

    before: tuple[nn.Parameter, ...]
    layers: tuple[tuple[nn.Parameter, ...], ...]
    after: tuple[nn.Parameter, ...]

    def work(self, cost: Callable[[nn.Parameter], int]) -> Work:
        """Return what a cost of each parameter makes for each part."""
        layers = tuple(sum(map(cost, layer)) for layer in self.layers)
        return Work(sum(map(cost, self.before)), layers, sum(map(cost, self.after)))

    def held_by(self, chunks: Chunks) -> Parts:
        """Return the parts without what the rank of the last stage has in the first one, too."""
        if chunks.holders[0] != chunks.holders[-1]:
            return self
        known = {id(param) for param in self.before}
        return self._replace(after=tuple(p for p in self.after if id(p) not in known))


def model_parts(model: nn.Module, info: StackInfo) -> Parts:
    """Return the parameters of every layer and of what is around them.

    Args:
        model: The whole model, on any device.
        info: Where its layers are.
    """
    layers = tuple(tuple(model.get_submodule(call.name).parameters()) for call in info.layers)
    before: list[nn.Parameter] = []
    after: list[nn.Parameter] = []
    for name, calls in info.segments.items():
        own = list(model.get_submodule(name).parameters(recurse=False))
        before += own * (0 in calls)
        after += own * (info.num_layers in calls)
    return Parts(tuple(before), layers, tuple(after))


def _matrices(layer: nn.Module, active: float) -> int:
    """Count a layer's matrix elements; of stacked experts as many as a token meets."""
    params = list(layer.parameters())
    dense = sum(p.numel() for p in params if p.ndim == 2)
    stacked = sum(p.numel() for p in params if p.ndim > 2)
    return dense + round(active * stacked)


def _active_share(model: nn.Module) -> float:
    """Return the share of a mixture's experts that one token is sent to."""
    config = getattr(model, "config", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(config, name, None)
        if isinstance(experts, int) and isinstance(chosen, int) and experts >= chosen > 0:
            return chosen / experts
    return 1.0
