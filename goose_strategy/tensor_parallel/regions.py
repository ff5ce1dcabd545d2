"""Entering and leaving an island of cut layers, without copies.

A pair for any tensor would have to clone before it reduces. Here the tensor is known to be fresh:
what leaves an island is the output of the row layer's matrix product, and the gradient that comes
back to its entry is the sum of the matrix products of its column layers' backwards, which autograd
accumulated in one buffer. Both are summed in place: one all-reduce per island and direction (``f``
and ``g`` of Shoeybi et al. 2019, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from goose_strategy.comm.collectives import all_reduce


class _Enter(torch.autograd.Function):
    """Identity; the gradient is summed in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        all_reduce(grad, ctx.group).wait()
        return grad, None


class _Leave(torch.autograd.Function):
    """Sum in place; the gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        all_reduce(x, group).wait()
        return x

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# Not into a compiled graph: torch's compiler would trace an exchange over the host once, and take
# what it then saw for a constant.
_enter: Callable[[Tensor, ProcessGroup], Tensor] = torch.compiler.disable(_Enter.apply)
_leave: Callable[[Tensor, ProcessGroup], Tensor] = torch.compiler.disable(_Leave.apply)


def enter_island(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Hand the same ``x`` to column layers of all ranks.

    Under autocast ``x`` is cast here, once for all column layers; its gradient then travels in the
    lower precision, too.

    Args:
        x: ``[..., features]``, equal on all ranks of the group, read by nothing but linear layers.
        group: Ranks that hold the slices; ``None`` for this rank alone.

    Returns:
        ``x``; its gradient is the sum of the gradients of all ranks.
    """
    if group is None:
        return x
    device = x.device.type
    if x.dtype is torch.float32 and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _enter(x, group)


def leave_island(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum what the ranks computed from their slices.

    Args:
        x: ``[..., features]``, this rank's summand; contiguous, needed by no one else, and
            overwritten by the sum.
        group: Ranks that hold the slices; ``None`` for this rank alone.

    Returns:
        ``x``, now the sum, equal to the last bit on all ranks.
    """
    if group is None:
        return x
    return _leave(x, group)
