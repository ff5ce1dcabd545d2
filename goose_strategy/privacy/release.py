"""The noise on this rank's slice of the gradients, between their sum and the optimizer.

Opacus adds noise in an optimizer of its own, to whole gradients. Here each rank adds it to the fp32
slices that it steps, once, after they were summed over everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.mesh.shard import ShardSpec
    from goose_strategy.privacy.noise import Noise


@dataclass(frozen=True, kw_only=True)
class Release:
    """What turns clipped sums into what may be published.

    Attributes:
        noise: Makes the noise.
        scale: Its standard deviation.
        step: Number of the step.
        divisor: What the noisy sums are divided by.
    """

    noise: Noise
    scale: float
    step: int
    divisor: float


@torch.no_grad()
def privatize(
    buckets: Iterable[Bucket],
    release: Release,
    specs: Mapping[str, ShardSpec],
    mesh: ParallelMesh,
) -> None:
    """Add noise to this rank's slice of every gradient and divide it, in place.

    A trainable parameter without a gradient gets one of noise alone: that no sample used it may not
    show.

    Args:
        buckets: Reduced.
        release: The noise.
        specs: Layouts by name.
        mesh: This rank's place.
    """
    for bucket in buckets:
        grads = bucket.grads
        grads.complete()
        for slot in grads.slots:
            first, last = max(slot.start, grads.start), min(slot.stop, grads.stop)
            if first >= last or slot.param.grad is None:
                continue
            target = grads.flat[first:last]
            if release.scale:
                release.noise.add(
                    target,
                    release.scale,
                    name=noise_name(slot.name, specs.get(slot.name), mesh),
                    step=release.step,
                    start=first - slot.start,
                )
            target.div_(release.divisor)


def noise_name(name: str, spec: ShardSpec | None, mesh: ParallelMesh) -> str:
    """Return the name that keys a parameter's noise.

    Copies of a tied weight have one name, replicas over tp too; slices have their own.
    """
    if spec is not None and spec.tie is not None:
        name = spec.tie
    if spec is None or not spec.is_sharded or mesh.tp_size == 1:
        return name
    return f"{name}|tp{mesh.tp_rank}/{mesh.tp_size}"
