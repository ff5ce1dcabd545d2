"""A rule per kind of layer; what has none is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import ConfigError, PrivacyError
from goose_strategy.grads.products import EmbeddingOwed, ProductOwed
from goose_strategy.grads.samples import SampleOwed
from goose_strategy.privacy import rules
from goose_strategy.privacy.products import Products
from goose_strategy.privacy.rules import has_rule, masked_lookup, register_rule, rule_of

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 4, 6, dtype=torch.float64, generator=GENERATOR)
GRAD = torch.randn(3, 4, 5, dtype=torch.float64, generator=GENERATOR)
FACTORS = torch.tensor([0.5, 1.0, 0.25], dtype=torch.float64)


def product(
    *, transposed: bool = False, rows: tuple[int, int] | None = None, out: int = 5, **changed: Any
) -> ProductOwed:
    weight = torch.zeros(6, out) if transposed else torch.zeros(out, 6)
    settings: dict[str, Any] = {
        "x": X,
        "grad": GRAD.reshape(-1, 5),
        "rows": rows,
        "transposed": transposed,
        "lead": (3, 4),
    }
    return ProductOwed(weight.double(), torch.zeros(out).double(), **settings | changed)


def per_sample(owed: Any, rows: int = 3) -> list[Tensor]:
    """Return every sample's gradients, from what the layer would compute for it alone."""
    rule = rule_of(owed)
    found: list[list[Tensor]] = []
    for row in range(rows):
        only = torch.zeros(rows, dtype=torch.float64)
        only[row] = 1
        found.append([part.clone() for part in rule.scaled(owed, only, None).compute()])
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def squares_of(owed: Any, summed: Tensor | None = None) -> Sequence[Tensor]:
    return rule_of(owed).squares(owed, 3, Products(), summed)


EMBEDDING = EmbeddingOwed(
    torch.zeros(9, 5).double(),
    ids=torch.tensor([[1, 1, 2, 0], [3, 4, 0, 0], [8, 8, 8, 8]]),
    grad=GRAD,
    padding=0,
)
EVERY = {
    "linear": product(),
    "conv1d": product(transposed=True),
    "rows of a layer": product(rows=(3, 5), out=9),
    "embedding": EMBEDDING,
    "sample": SampleOwed(torch.zeros(5).double(), GRAD.sum(1)),
}


@pytest.mark.parametrize("kind", EVERY)
def test_squares_are_those_of_each_samples_gradient(kind: str) -> None:
    owed = EVERY[kind]
    for found, gradients in zip(squares_of(owed), per_sample(owed), strict=True):
        expected = torch.flatten(gradients, 1).square().sum(1)
        assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", EVERY)
def test_scaled_gradients_are_the_sum_of_scaled_samples(kind: str) -> None:
    owed = EVERY[kind]
    scaled = rule_of(owed).scaled(owed, FACTORS, None)
    assert scaled.parameters == owed.parameters or len(scaled.parameters) == len(owed.parameters)
    for found, gradients in zip(scaled.compute(), per_sample(owed), strict=True):
        expected = torch.einsum("i,i...->...", FACTORS, gradients)
        assert torch.allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", ["linear", "rows of a layer", "sample"])
def test_shares_are_summed_before_they_are_squared(kind: str) -> None:
    owed = EVERY[kind]
    share = rule_of(owed).shared(owed, 3)
    # Two ranks with equal shares: twice the gradient, four times its square.
    for found, alone in zip(squares_of(owed, 2 * share), squares_of(owed), strict=True):
        assert torch.allclose(found, 4 * alone, rtol=1e-12)
    share.zero_()
    assert all(bool(square.any()) for square in squares_of(owed)), "what was pushed has changed"


def test_a_bias_alone() -> None:
    owed = ProductOwed(
        None,
        torch.zeros(5),
        x=None,
        grad=GRAD,
        rows=None,
        transposed=False,
        lead=(3, 4),
    )
    (found,) = squares_of(owed)
    assert torch.allclose(found, GRAD.sum(1).square().sum(1))
    (scaled,) = rule_of(owed).scaled(owed, FACTORS, None).compute()
    assert torch.allclose(scaled.double(), torch.einsum("i,itj->j", FACTORS, GRAD).float().double())


def test_what_is_not_finite_is_gone() -> None:
    x, grad = X.clone(), GRAD.clone()
    x[1], grad[1] = float("inf"), float("nan")
    owed = product(x=x, grad=grad.reshape(-1, 5))
    good = torch.tensor([True, False, True])
    factors = torch.where(good, FACTORS, torch.zeros_like(FACTORS))
    weight, bias = rule_of(owed).scaled(owed, factors, good).compute()
    clean = product(x=torch.where(good.view(-1, 1, 1), X, 0.0))
    expected = rule_of(clean).scaled(clean, factors, None).compute()
    assert torch.allclose(weight, expected[0])
    assert torch.allclose(bias, expected[1])


def test_padding_has_no_gradient() -> None:
    assert not masked_lookup(EMBEDDING, 3)[0, 3].any()
    assert masked_lookup(EMBEDDING, 3)[0, 0].any()


@pytest.mark.parametrize(
    "owed",
    [
        product(lead=(12,)),
        product(lead=(4, 3)),
        EmbeddingOwed(torch.zeros(9, 5), ids=torch.arange(4)[None], grad=GRAD[:1], padding=None),
        SampleOwed(torch.zeros(5), GRAD.sum(1)[:2]),
    ],
    ids=["flattened", "transposed", "positions of one row", "other rows"],
)
def test_samples_that_cannot_be_told_apart_are_refused(owed: Any) -> None:
    with pytest.raises(PrivacyError, match=r"told apart|rows in a microbatch"):
        squares_of(owed)


def test_an_embedding_of_which_ranks_have_shares_is_refused() -> None:
    with pytest.raises(PrivacyError, match="has no rule"):
        rule_of(EMBEDDING).shared(EMBEDDING, 3)


class Other:
    """What a layer of somebody else's leaves."""

    parameters: Sequence[Tensor] = ()
    held: Sequence[Tensor] = ()

    def compute(self) -> Sequence[Tensor]:
        return ()


def test_a_kind_without_a_rule_is_refused_until_it_has_one() -> None:
    class Layer(nn.Module):
        pass

    with patch.dict(rules._RULES), patch.dict(rules._MODULES):
        with pytest.raises(PrivacyError, match="Other has no rule"):
            rule_of(Other())
        assert not has_rule(Layer())

        @register_rule(Other, modules=[Layer])
        class OtherRule:
            pass

        assert type(rule_of(Other())).__name__ == "OtherRule"
        assert has_rule(Layer())
        with pytest.raises(ConfigError, match="kind=Other has the rule OtherRule already"):
            register_rule(Other)(OtherRule)
