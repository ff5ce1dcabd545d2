"""What each kind of layer adds to the norm of a sample's gradient, and its gradient when scaled.

Opacus hooks modules and keeps a gradient per sample and parameter, or runs a second backward. Here
the layers have left what their gradients are made of (`goose_strategy.grads`), and a rule per kind
reads the norms from it: by products of tokens where these are cheaper than the gradients
themselves (Goodfellow 2015, arXiv:1510.01799; Li et al. 2021, arXiv:2110.05679; the choice between
both Bu et al. 2022, arXiv:2205.10683). A kind without a rule is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from goose_strategy.errors import ConfigError, PrivacyError
from goose_strategy.grads.products import EmbeddingOwed, ProductOwed
from goose_strategy.grads.samples import SampleOwed
from goose_strategy.privacy.products import (
    embedding_squares,
    factor_dtype,
    product_squares,
    scaled_rows,
    wide,
    without_bad_rows,
)

if TYPE_CHECKING:
    from goose_strategy.grads.store import Owed
    from goose_strategy.privacy.products import Products


class Rule(Protocol):
    """What one kind of `Owed` needs."""

    def shared(self, owed: Any, rows: int) -> Tensor:
        """Return what has to be summed over tp where each rank has a share of the gradient."""

    def squares(
        self, owed: Any, rows: int, how: Products, summed: Tensor | None
    ) -> Sequence[Tensor]:
        """Return ``[rows]`` per parameter: squared norms of each sample's gradient.

        Args:
            owed: What a layer left.
            rows: Samples of the microbatch.
            how: How products are computed.
            summed: What `shared` returned, summed over tp, if there is a share only.

        Raises:
            PrivacyError: If the samples cannot be told apart.
        """

    def scaled(self, owed: Any, factors: Tensor, good: Tensor | None) -> Owed:
        """Return the same with each sample's gradient times its factor.

        Args:
            owed: What a layer left.
            factors: ``[rows]``.
            good: ``[rows]``, which samples are finite; ``None`` if all are.
        """


_RULES: dict[type, Rule] = {}
_MODULES: dict[type[nn.Module], type] = {}
_T = TypeVar("_T", bound=type)


def register_rule(kind: type, *, modules: Sequence[type[nn.Module]] = ()) -> Callable[[_T], _T]:
    """Register a rule for a kind of `Owed`, and modules whose parameters are pushed as that kind.

    A module that is named here is given the store as its attribute ``weight_gradients`` and must
    push one ``kind`` for all of its parameters in every backward while ``store.active``.

    Args:
        kind: The class that the module's backward pushes.
        modules: Classes of such modules.

    Raises:
        ConfigError: If the kind has a rule already.
    """

    def add(rule: _T) -> _T:
        if kind in _RULES:
            raise ConfigError(
                f"kind={kind.__name__} has the rule {type(_RULES[kind]).__name__} already."
            )
        _RULES[kind] = rule()
        _MODULES.update(dict.fromkeys(modules, kind))
        return rule

    return add


def rule_of(owed: Owed) -> Rule:
    """Return the rule for what a layer left.

    Raises:
        PrivacyError: If there is none.
    """
    rule = _RULES.get(type(owed))
    if rule is None:
        raise PrivacyError(
            f"{type(owed).__name__} has no rule for the norm of a sample's gradient; register one "
            "with register_rule."
        )
    return rule


def has_rule(module: nn.Module) -> bool:
    """Tell whether a module's class was registered with a rule."""
    return type(module) in _MODULES


@register_rule(ProductOwed)
class ProductRule:
    """Linear layers: weight ``[out, in]`` and bias ``[out]``."""

    def shared(self, owed: ProductOwed, rows: int) -> Tensor:
        """Return the gradient of the whole layer's output: ``[rows, tokens, out]``.

        The input is the same on every tp rank, so that the sum of the gradients' products is the
        product with their sum.
        """
        grad = _outputs(owed, rows)
        if owed.rows is None:
            return grad.to(wide(grad.dtype), copy=True)
        params = owed.parameters
        whole = grad.new_zeros(*grad.shape[:2], params[0].shape[0], dtype=wide(grad.dtype))
        whole.narrow(2, *owed.rows).copy_(grad)
        return whole

    def squares(
        self, owed: ProductOwed, rows: int, how: Products, summed: Tensor | None
    ) -> Sequence[Tensor]:
        """See `Rule`."""
        grad = _outputs(owed, rows) if summed is None else summed
        found = []
        if owed.weight is not None and owed.x is not None:
            x = owed.x.reshape(rows, -1, owed.x.shape[-1])
            found.append(product_squares(x, grad, how))
        if owed.bias is not None:
            total = grad.sum(1, dtype=wide(grad.dtype))
            found.append(total.square().sum(1))
        return found

    def scaled(self, owed: ProductOwed, factors: Tensor, good: Tensor | None) -> Owed:
        """See `Rule`."""
        rows = factors.shape[0]
        grad = _outputs(owed, rows)
        x = owed.x
        if x is not None:
            x = without_bad_rows(x.reshape(rows, -1, x.shape[-1]), good).view(x.shape)
            x = x.to(factor_dtype(x))
        return ProductOwed(
            owed.weight,
            owed.bias,
            x=x,
            grad=scaled_rows(grad, factors, good, factor_dtype(grad)).view(owed.grad.shape),
            rows=owed.rows,
            transposed=owed.transposed,
            lead=owed.lead,
            widen=True,
        )


@register_rule(EmbeddingOwed)
class EmbeddingRule:
    """Embeddings: weight ``[ids, width]``."""

    refusal: ClassVar[str] = (
        "an embedding was looked up for ids of shape {shape}, not [{rows}, tokens], so the samples "
        "cannot be told apart; pass ids (position_ids, for one) for every row."
    )

    def shared(self, owed: EmbeddingOwed, rows: int) -> Tensor:  # noqa: ARG002
        """Refuse: cut embeddings hold disjoint rows, and whole ones whole gradients."""
        raise PrivacyError("an embedding of which each tp rank has a share has no rule.")

    def squares(
        self,
        owed: EmbeddingOwed,
        rows: int,
        how: Products,  # noqa: ARG002
        summed: Tensor | None,  # noqa: ARG002
    ) -> Sequence[Tensor]:
        """See `Rule`."""
        shape = tuple(owed.ids.shape)
        if len(shape) < 2 or shape[0] != rows:
            raise PrivacyError(self.refusal.format(shape=shape, rows=rows))
        ids = owed.ids.reshape(rows, -1)
        grad = masked_lookup(owed, rows)
        return [embedding_squares(ids, grad, owed.weight.shape[0])]

    def scaled(self, owed: EmbeddingOwed, factors: Tensor, good: Tensor | None) -> Owed:
        """See `Rule`."""
        rows = factors.shape[0]
        grad = owed.grad.reshape(rows, -1, owed.grad.shape[-1])
        return EmbeddingOwed(
            owed.weight,
            ids=owed.ids,
            grad=scaled_rows(grad, factors, good, wide(grad.dtype)).view(owed.grad.shape),
            padding=None if owed.padding < 0 else owed.padding,
        )


@register_rule(SampleOwed)
class SampleRule:
    """Parameters whose gradients are known per sample: norms, and biases added by themselves."""

    def shared(self, owed: SampleOwed, rows: int) -> Tensor:
        """Return the gradients of this rank, ``[rows, elements]``."""
        flat = _samples(owed, rows)
        return flat.to(wide(flat.dtype), copy=True)

    def squares(
        self,
        owed: SampleOwed,
        rows: int,
        how: Products,  # noqa: ARG002
        summed: Tensor | None,
    ) -> Sequence[Tensor]:
        """See `Rule`."""
        flat = _samples(owed, rows) if summed is None else summed
        return [flat.to(wide(flat.dtype)).square().sum(1)]

    def scaled(self, owed: SampleOwed, factors: Tensor, good: Tensor | None) -> Owed:
        """See `Rule`."""
        grad = _samples(owed, factors.shape[0])
        dtype = wide(grad.dtype)
        scaled = scaled_rows(grad.unsqueeze(1), factors, good, dtype).view(owed.grad.shape)
        return SampleOwed(owed.param, scaled)


def masked_lookup(owed: EmbeddingOwed, rows: int) -> Tensor:
    """Return the gradient of what was looked up, ``[rows, tokens, width]``, zero at the padding."""
    grad = owed.grad.reshape(rows, -1, owed.grad.shape[-1])
    if owed.padding >= 0:
        grad = grad.masked_fill(owed.ids.reshape(rows, -1, 1) == owed.padding, 0.0)
    return grad


def _outputs(owed: ProductOwed, rows: int) -> Tensor:
    """Return the gradient of a layer's output as ``[rows, tokens, out]``."""
    if len(owed.lead) < 2 or owed.lead[0] != rows:
        shapes = [tuple(param.shape) for param in owed.parameters]
        raise PrivacyError(
            f"a linear layer (parameters {shapes}) was given an input of leading shape "
            f"{list(owed.lead)}, not [{rows}, tokens], so the samples cannot be told apart; the "
            "layer must see its input before it is flattened, or its parameters be frozen."
        )
    return owed.grad.reshape(rows, -1, owed.grad.shape[-1])


def _samples(owed: SampleOwed, rows: int) -> Tensor:
    if owed.grad.shape[0] != rows:
        raise PrivacyError(
            f"a parameter of shape {tuple(owed.param.shape)} met an input of "
            f"{owed.grad.shape[0]} rows in a microbatch of {rows} samples."
        )
    return torch.flatten(owed.grad, 1)
