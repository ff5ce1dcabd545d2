"""Loss scaling for fp16: one decision for all ranks.

torch's ``GradScaler`` looks at ``p.grad`` of one process. Here gradients are right in slices only,
and each stage and shard sees other ones: a scaler per rank would skip on one rank and step on the
next, and scales would drift apart. What is searched for infinities here are the reduced slices of
the whole model, and every rank learns the same. Growing and backing off stay torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from goose_strategy.optim.clip import GradientSource, global_power_sum, scale_gradients

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh


class LossScaler(Protocol):
    """What knows the scale of the loss."""

    def current(self, device: torch.device) -> Tensor | None:
        """Return the scale, an fp32 scalar that no later update changes; ``None`` if disabled."""


def unscale(sources: Sequence[GradientSource], mesh: ParallelMesh, inverse: Tensor) -> Tensor:
    """Multiply reduced gradients, and tell whether any was not finite. Collective over the world.

    Args:
        sources: Whose gradients; each rank passes its part of the same model.
        mesh: Where the ranks are.
        inverse: One over the scale of the loss, an fp32 scalar.

    Returns:
        1.0 where any gradient of the model is NaN or infinite, else 0.0: an fp32 scalar of the same
        bits on all ranks.
    """
    buckets = [bucket for source in sources for bucket in source.gradient_buckets()]
    # The largest value, because sums of squares of scaled gradients overflow before they do.
    largest, _ = global_power_sum(buckets, mesh, math.inf, 0.0)
    scale_gradients(buckets, inverse.to(mesh.device))
    return (~largest.isfinite()).float()
