"""Which layers leave their weights' gradients to a later action.

``torch.distributed.pipelining`` finds weight gradients by walking the graph of every backward. Here
the layers that have nearly all of the weights are told once where to leave theirs: linear layers,
GPT-2's ``Conv1D`` and embeddings, whole or cut over tp, by themselves or under adapters. What they
compute is in `goose_strategy.grads.products`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from goose_strategy.compat.transformers import is_conv1d, is_linear_twin, is_scaled_embedding
from goose_strategy.grads import products
from goose_strategy.tensor_parallel.convert import Converted

if TYPE_CHECKING:
    from goose_strategy.grads.store import WeightGradStore


class DeferredLinear(Converted, nn.Linear):
    """A linear layer that pushes; made by `defer_weight_gradients`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute ``[..., out]`` from ``[..., in]``."""
        return products.linear(input, self.weight, self.bias, store=self.weight_gradients)


class DeferredEmbedding(Converted, nn.Embedding):
    """An embedding that pushes; made by `defer_weight_gradients`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Look up ``[..., width]`` for ids ``[...]``."""
        return products.embedding(input, self.weight, self.padding_idx, store=self.weight_gradients)


class _Twin(Converted):
    """A linear layer that adds its bias to the finished product, as transformers' Falcon does."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        product = products.linear(x, self.weight, store=self.weight_gradients)
        return product if self.bias is None else product + self.bias


class _Conv1D(Converted):
    weight: Tensor
    bias: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return products.conv1d(x, self.weight, self.bias, store=self.weight_gradients)


@functools.cache
def _class_for(plain: Any, own: Any) -> type[Converted]:
    """Return a class between ``plain`` and its base.

    What ``plain`` overrides goes on working, also a forward that scales what its base looked up.
    """
    made: type[Converted] = own
    if plain not in (nn.Linear, nn.Embedding):
        bases = (own, plain) if own in (_Twin, _Conv1D) else (plain, own)
        made = type(f"Deferred{plain.__name__}", bases, {})
    return made


def _deferred_class(module: nn.Module) -> type[Converted] | None:
    """Return the class that lets a plain module push; ``None`` if it computes something else."""
    cls: Any = type(module)
    if is_linear_twin(cls):
        return _class_for(cls, _Twin)
    if is_conv1d(module):
        return _class_for(cls, _Conv1D)
    if cls.forward is nn.Linear.forward:
        return _class_for(cls, DeferredLinear)
    if cls.forward is nn.Embedding.forward or is_scaled_embedding(cls):
        special = ("max_norm", "scale_grad_by_freq", "sparse")
        if not any(getattr(module, option) for option in special):
            return _class_for(cls, DeferredEmbedding)
    return None


def defer_weight_gradients(model: nn.Module, store: WeightGradStore) -> Callable[[], None]:
    """Let the layers of ``model`` push their weights' gradients to ``store`` while it collects.

    To be called behind `parallelize` and before any ``forward`` is replaced on an instance. Modules
    with a forward of their own, or with a weight that is computed from others, are left alone, as
    are all parameters that are not named here: norms, stacked experts, the bias of a row layer.
    Those accumulate with the input gradients.

    Args:
        model: The model, cut or not; parameters, names and modules stay the same objects.
        store: Where gradients are left.

    Returns:
        What undoes it.
    """
    told: list[Converted] = []
    swapped: list[Converted] = []
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if type(own.get("weight")) is not nn.Parameter or "forward" in vars(module):
            continue
        if isinstance(module, Converted):
            if module.defers:
                module.weight_gradients = store
                told.append(module)
        elif (cls := _deferred_class(module)) is not None:
            swapped.append(cls.adopt(module, weight_gradients=store))

    def restore() -> None:
        for module in told:
            del module.weight_gradients
        for module in swapped:
            module.restore()

    return restore
