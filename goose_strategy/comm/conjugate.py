"""Collectives that autograd sees: each forward operation has its conjugate in the backward.

``torch.distributed.nn`` and the functional collectives differentiate a collective as the sum over
the losses of all ranks. In tensor parallelism all ranks of a group compute the *same* loss, so the
conjugate of an all-reduce is the identity and the other way round (Shoeybi et al. 2019,
arXiv:1909.08053, section 3). Without gradients these functions cost no autograd node at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from goose_strategy.comm.collectives import all_gather_uneven, all_reduce


class _CopyToGroup(torch.autograd.Function):
    """Identity; the gradient is summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The engine may hand the same tensor to another node, so it is never reduced in place.
        total = grad.clone(memory_format=torch.contiguous_format)
        all_reduce(total, ctx.group)
        return total, None


class _ReduceFromGroup(torch.autograd.Function):
    """Sum; the gradient passes as it is."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        all_reduce(total, group)
        return total

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromGroup(torch.autograd.Function):
    """Concatenate; each rank keeps its slice of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.dim = dim
        ctx.start = sum(sizes[: group.rank()])
        ctx.length = x.shape[dim]
        return all_gather_uneven(x, group, dim=dim, sizes=sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.narrow(ctx.dim, ctx.start, ctx.length), None, None, None


_copy_to_group: Callable[[Tensor, ProcessGroup], Tensor] = _CopyToGroup.apply
_reduce_from_group: Callable[[Tensor, ProcessGroup], Tensor] = _ReduceFromGroup.apply
_gather_from_group: Callable[[Tensor, ProcessGroup, int, Sequence[int]], Tensor] = (
    _GatherFromGroup.apply
)


def copy_to_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Enter a region where each rank computes a share from the same ``x``.

    Args:
        x: Any shape, equal on all ranks of the group.
        group: Ranks that share the work; ``None`` for this rank alone.

    Returns:
        ``x``; its gradient is the sum of the gradients of all ranks.
    """
    if group is None or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _copy_to_group(x, group)


def reduce_from_group(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Leave a region of shared work: sum what each rank computed.

    Args:
        x: Any shape, this rank's summand.
        group: Ranks that share the work; ``None`` for this rank alone.

    Returns:
        The sum, equal to the last bit on all ranks; each rank's gradient is the sum's gradient.
    """
    if group is None:
        return x
    return _reduce_from_group(x, group)


def gather_from_group(
    x: Tensor, group: ProcessGroup | None, *, dim: int, sizes: Sequence[int]
) -> Tensor:
    """Concatenate the slices of all ranks; the gradient of each is its slice.

    Args:
        x: This rank's slice, ``sizes[group rank]`` long along ``dim``.
        group: Ranks that hold the slices; ``None`` for this rank alone.
        dim: Dimension along which the slices lie.
        sizes: Length of every rank's slice; they may differ.

    Returns:
        The whole tensor, equal on all ranks.
    """
    if group is None:
        return x
    return _gather_from_group(x, group, dim % x.ndim, tuple(sizes))


def sum_value(value: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum a value (a loss, a count) over the group; the gradient passes as it is.

    Args:
        value: Any shape, usually a scalar; left as it is.
        group: Ranks whose values are summed; ``None`` for this rank alone.

    Returns:
        The sum, equal to the last bit on all ranks.
    """
    return reduce_from_group(value, group)
