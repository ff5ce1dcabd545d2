"""Gradients of small parameters, one per sample.

Where weight gradients are clipped per sample, those of norms and of biases that are added by
themselves have to be known per sample, too. torch's ``vmap`` of ``grad`` computes a model's
gradients once per sample. Here a parameter is spread over the samples before it is used, so that
the one backward leaves one gradient per sample, at the cost of the sum that it would do anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from goose_strategy.errors import PrivacyError
from goose_strategy.grads.products import fitting

if TYPE_CHECKING:
    from goose_strategy.grads.store import WeightGradStore


def per_sample(param: Tensor, like: Tensor, store: WeightGradStore) -> Tensor:
    """Return a parameter that has one gradient per row of ``like``.

    Args:
        param: ``[...]``; it is used along the last dimensions of ``like``.
        like: ``[rows, ...]``, of more dimensions than ``param``.
        store: Where the gradients are left.

    Returns:
        ``[rows, 1, ..., *param.shape]``, or ``param`` itself where no gradient is wanted.

    Raises:
        RuntimeError: If ``like`` has no dimension for its rows.
    """
    if not (torch.is_grad_enabled() and param.requires_grad and param.is_leaf):
        return param
    if like.dim() <= param.dim():
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} meets an input of shape "
            f"{tuple(like.shape)}, which has no dimension for the samples"
        )
    spread: Tensor = _Spread.apply(param, like.shape[0], like.dim(), store)  # type: ignore[no-untyped-call]
    return spread


def add_bias(output: Tensor, bias: Tensor, *, store: WeightGradStore | None) -> Tensor:
    """Add a bias ``[out]`` to a finished product ``[..., out]``, in place if it has one gradient.

    Args:
        output: Of which nobody else needs the value.
        bias: In any precision.
        store: Where its gradients are left, if they are wanted per sample.
    """
    if store is not None and store.per_sample:
        return output + per_sample(bias, output, store).to(output.dtype)
    # Under autocast the bias has the layer's precision, not that of its parameter.
    return output.add_(bias.to(output.dtype))


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, rows: int, dims: int, store: WeightGradStore) -> Tensor:
        ctx.param, ctx.store = param, store
        between = (1,) * (dims - 1 - param.dim())
        return param.view(1, *between, *param.shape).expand(rows, *between, *param.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        param, store = ctx.param, ctx.store
        if not store.active:
            raise PrivacyError(
                "a backward outside of model(**batch) with labels reached a parameter whose "
                "gradients are wanted per sample; let the model's own call compute the loss "
                "(labels=..., or PipelineConfig(loss_fn=...)), or detach what it returned."
            )
        store.push(SampleOwed(param, grad.reshape(grad.shape[0], *param.shape)))
        return None, None, None, None


class SampleOwed:
    """The gradient of a parameter, known per sample.

    Args:
        param: ``[...]``.
        grad: ``[rows, ...]``.
    """

    __slots__ = ("grad", "param")

    def __init__(self, param: Tensor, grad: Tensor) -> None:
        self.param = param
        self.grad = grad

    @property
    def parameters(self) -> Sequence[Tensor]:
        """See `Owed`."""
        return (self.param,)

    @property
    def held(self) -> Sequence[Tensor]:
        """See `Owed`."""
        return (self.grad,)

    def compute(self) -> Sequence[Tensor]:
        """See `Owed`."""
        return (fitting(self.grad.sum(0), self.param),)
