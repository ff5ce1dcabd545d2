"""Stages of equal work: what each layer costs, counted.

torch's pipelining cuts where it is told to, Megatron by number of layers. Behind the last layer
comes the head, in a small model with a large vocabulary as much work as three layers, and a
pipeline is as fast as its slowest stage.

Work is counted, not measured: a token costs each matrix's elements in multiplications, whatever
the device. Attention between tokens is left out, as its share depends on the length of the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from goose_strategy.pipeline_parallel.minmax import Load

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.stack import StackInfo


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
