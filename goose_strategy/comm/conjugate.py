"""Collectives that autograd sees: each forward operation has its conjugate in the backward.

``torch.distributed.nn`` and the functional collectives differentiate a collective as the sum over
the losses of all ranks. In tensor parallelism all ranks of a group compute the *same* loss, so the
conjugate of putting slices together is to take one's slice, and the other way round (Shoeybi et al.
2019, arXiv:1909.08053, section 3). The pair of the all-reduce, which works in place, is in
`goose_strategy.tensor_parallel.regions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from goose_strategy.comm.collectives import all_gather_uneven


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


class _SplitToGroup(torch.autograd.Function):
    """Keep this rank's slice; the gradients of all slices are put together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return x.narrow(dim, sum(sizes[: group.rank()]), sizes[group.rank()])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        whole = all_gather_uneven(grad.contiguous(), ctx.group, dim=ctx.dim, sizes=ctx.sizes)
        return whole, None, None, None


_Slicing = Callable[[Tensor, ProcessGroup, int, Sequence[int]], Tensor]
# Not into a compiled graph: an exchange over the host is no operation of torch's compiler.
_gather_from_group: _Slicing = torch.compiler.disable(_GatherFromGroup.apply)
_split_to_group: _Slicing = torch.compiler.disable(_SplitToGroup.apply)


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


def split_to_group(
    x: Tensor, group: ProcessGroup | None, *, dim: int, sizes: Sequence[int]
) -> Tensor:
    """Keep this rank's slice of what all ranks hold; the gradient is whole on every rank.

    Args:
        x: The whole tensor, equal on all ranks of the group.
        group: Ranks that take the slices; ``None`` for this rank alone.
        dim: Dimension along which the slices lie.
        sizes: Length of every rank's slice.

    Returns:
        A view, ``sizes[group rank]`` long along ``dim``.
    """
    if group is None:
        return x
    return _split_to_group(x, group, dim % x.ndim, tuple(sizes))
