"""Stages of equal work: what each layer costs, and the best cut for it.

torch's pipelining cuts where it is told to, Megatron by number of layers. Behind the last layer
comes the head, in a small model with a large vocabulary as much work as three layers, and a
pipeline is as fast as its slowest stage.

Work is counted, not measured: a token costs each matrix's elements in multiplications, whatever
the device. Attention between tokens is left out, as its share depends on the length of the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.stack import StackInfo


class Work(NamedTuple):
    """Multiplications per token, forward only.

    Attributes:
        before: Of what comes before the first layer.
        layers: Of each layer.
        after: Of what comes after the last layer, the head among it.
    """

    before: int
    layers: tuple[int, ...]
    after: int


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


def balance(work: Work, stages: int) -> list[int]:
    """Cut layers into contiguous stages so that the slowest is as fast as possible.

    Exact, by dynamic programming over the first layers and stages. Among cuts with the same
    slowest stage the one with the smallest sum of squares is taken, then the one with fewer layers
    in front: the further forward a stage is, the more microbatches' activations it holds.

    Args:
        work: What everything costs.
        stages: Number of stages, at most the number of layers.

    Returns:
        The number of layers of each stage, all at least 1.
    """
    sums = [0]
    for cost in work.layers:
        sums.append(sums[-1] + cost)
    last = len(work.layers)
    # best[n]: slowest stage, sum of squares and counts of the first n layers in `stage` stages.
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for stage in range(stages):
        further: dict[int, tuple[int, int, list[int]]] = {}
        left = stages - stage - 1
        for stop in range(stage + 1, last - left + 1) if left else [last]:
            found = []
            for start, (slowest, squares, counts) in best.items():
                if start < stop:
                    cost = sums[stop] - sums[start]
                    cost += work.before * (stage == 0) + work.after * (left == 0)
                    total = squares + cost * cost
                    found.append((max(slowest, cost), total, [*counts, stop - start]))
            further[stop] = min(found)
        best = further
    return best[last][2]
