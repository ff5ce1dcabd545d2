"""Clipping by the norm of the whole model, decided before anything is changed.

``torch.nn.utils.clip_grad_norm_`` sees one rank's parameters, and sums millions of squares in fp32
(4e-5 off for 2.5 million elements). Here every element of the model is counted once (a
tp-replicated one on tp rank 0, a tied one on its owner), and the partial sums of all ranks are
gathered and added as integers, so that all ranks hold the same bits and take the same decision. Any
other number of replicas or size of buckets gives the same bits, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from goose_strategy.comm.collectives import all_gather_flat
from goose_strategy.data_parallel.reducer import Reducer
from goose_strategy.errors import ConfigError
from goose_strategy.optim.factors import check_factors, take_factors
from goose_strategy.optim.norm import SIZE, combined_power_sum, partial_power_sum

if TYPE_CHECKING:
    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.mesh.mesh import ParallelMesh


class GradientSource(Protocol):
    """What can be clipped: a `Reducer` (all its gradients) or a `ZeroShards` (one optimizer's)."""

    def gradient_buckets(self) -> list[Bucket]:
        """Return buckets whose gradients are reduced."""


@runtime_checkable
class Judged(Protocol):
    """A source that may decide by the norm whether it steps."""

    @property
    def skips(self) -> bool:
        """Whether it skips a step whose gradients are not finite."""

    def note_norm(self, total: Tensor) -> None:
        """Note the power sum of the gradients as they are now."""


def clip_grad_norm(
    sources: Sequence[GradientSource],
    mesh: ParallelMesh,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm over the whole model is at most ``max_norm``.

    Collective over the world.

    Args:
        sources: Whose gradients to clip; each rank passes its part of the same model.
        mesh: Where the ranks are.
        max_norm: Largest norm after clipping.
        norm_type: Order of the norm, ``inf`` included.
        error_if_nonfinite: Raise if the norm is not finite, before any gradient is changed.

    Returns:
        The norm before clipping: a scalar on the device, equal on all ranks, fp64 if any
        parameter is, frozen ones included, else fp32.

    Raises:
        ConfigError: If ``norm_type`` is not positive.
        RuntimeError: If the norm is not finite and that was asked for.
        BatchError: If ranks multiplied the pipelined loss by different factors.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ConfigError(f"norm_type={norm_type} must be greater than 0, or inf.")
    buckets = [bucket for source in sources for bucket in source.gradient_buckets()]
    # The host looks at the numbers where that is free, and on a device if it was asked to.
    looks = error_if_nonfinite or mesh.device.type == "cpu"
    factors = take_factors(_reducers_of(sources)) if looks else 0.0
    norm, every_factor = global_power_sum(buckets, mesh, norm_type, factors)
    judged = [source for source in sources if isinstance(source, Judged)]
    for source in judged:
        source.note_norm(norm)
    norm = norm if math.isinf(norm_type) else norm ** (1.0 / norm_type)
    if looks:
        check_factors(every_factor.tolist())
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they "
            "cannot be clipped; none was changed. Pass error_if_nonfinite=False to go on."
        )
    wide = any(reducer.wide for reducer in _reducers_of(sources))
    norm = norm if wide else norm.float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if len(judged) == len(sources) and all(source.skips for source in judged):
        # They will be skipped; what is not finite already needs no spreading.
        factor = torch.where(norm.isfinite(), factor, 1.0)
    scale_gradients(buckets, factor)
    return norm


def scale_gradients(buckets: Sequence[Bucket], factor: Tensor) -> None:
    """Multiply this rank's slices of reduced gradients by a scalar tensor."""
    on_cpu = factor.device.type == "cpu"
    # Reading the factor is free on the CPU and would make the host wait on a device.
    if on_cpu and float(factor) == 1.0:
        return
    for bucket in buckets:
        for run in gradient_runs(bucket):
            run.mul_(factor)
        if on_cpu and math.isnan(factor):
            # Between parameters must stay zeros, or the next norms would be NaN, too.
            grads = bucket.grads
            ends = [*(slot.start for slot in grads.slots[1:]), grads.flat.numel()]
            for slot, end in zip(grads.slots, ends, strict=True):
                grads.flat[slot.stop : end] = 0


def clip_grad_value(sources: Sequence[GradientSource], clip_value: float) -> None:
    """Limit every element of the reduced gradients to ``[-clip_value, clip_value]``.

    Args:
        sources: Whose gradients to clip.
        clip_value: Largest absolute value.
    """
    for source in sources:
        for bucket in source.gradient_buckets():
            for run in gradient_runs(bucket):
                run.clamp_(-clip_value, clip_value)


def gradient_runs(bucket: Bucket) -> list[Tensor]:
    """Return this rank's slice of a bucket as few flat tensors, without cleared parameters."""
    grads = bucket.grads
    if all(slot.param.grad is not None for slot in grads.slots):
        return [grads.own]
    runs: list[tuple[int, int]] = []
    for slot in grads.slots:
        first, last = max(slot.start, grads.start), min(slot.stop, grads.stop)
        if slot.param.grad is None or first >= last:
            continue
        if runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return [grads.flat[first:last] for first, last in runs]


def global_power_sum(
    buckets: Iterable[Bucket], mesh: ParallelMesh, norm_type: float, factors: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Gather two things of every rank: its part of the norm, and the factors it scaled by.

    Returns:
        The power sum (or maximum) over the model, an fp64 scalar of the same bits on all ranks, and
        the factors, ``[world]`` in fp64.
    """
    runs = [
        run
        for bucket in buckets
        if bucket.key.tie_owner and (mesh.tp_rank == 0 or not bucket.key.tp_replicated)
        for run in gradient_runs(bucket)
    ]
    mine = torch.zeros(SIZE + 1, dtype=torch.int64, device=mesh.device)
    mine[:SIZE] = partial_power_sum(runs, norm_type, mesh.device)
    factor = torch.zeros((), dtype=torch.float64, device=mesh.device) + factors
    mine[SIZE] = factor.view(torch.int64)
    gathered = mine.new_empty(mesh.layout.world_size * mine.numel())
    all_gather_flat(gathered, mine, mesh.world).wait()
    everyone = gathered.view(-1, mine.numel())
    factors_of = everyone[:, SIZE].contiguous().view(torch.float64)
    return combined_power_sum(everyone[:, :SIZE], norm_type), factors_of


def _reducers_of(sources: Iterable[GradientSource]) -> list[Reducer]:
    """Return the reducers behind some sources, each once."""
    found = [getattr(source, "reducer", source) for source in sources]
    return list({id(r): r for r in found if isinstance(r, Reducer)}.values())
