"""Norms by products of tokens, and by the gradients themselves, are the same numbers."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from goose_strategy.privacy import products
from goose_strategy.privacy.products import (
    Products,
    embedding_squares,
    factor_dtype,
    product_squares,
    scaled_rows,
    tied_rows,
    wide,
    without_bad_rows,
)

X = torch.randn(3, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
GRAD = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
EXPECTED = torch.einsum("bto,bti->boi", GRAD, X).square().sum((1, 2))


@pytest.mark.parametrize("norm", ["mixed", "ghost", "instantiate"])
@pytest.mark.parametrize("most", [1, 2**24])
def test_squares_of_products(norm: str, most: int) -> None:
    with patch.object(products, "MOST", most):
        found = product_squares(X, GRAD, Products(norm))  # type: ignore[arg-type]
    assert torch.allclose(found, EXPECTED, rtol=1e-12)


def test_the_cheaper_way_is_taken() -> None:
    how = Products()
    assert how.ghost(tokens=8, width=1024, out=1024)
    assert not how.ghost(tokens=512, width=1024, out=1024)
    assert not how.ghost(tokens=16, width=1024, out=4), "an adapter's factor is small itself"
    assert Products("ghost").ghost(tokens=10**6, width=2, out=2)
    assert not Products("instantiate").ghost(tokens=1, width=100, out=100)


def test_layers_that_read_one_input_share_its_products() -> None:
    how = Products("ghost")
    first = how.gram(X)
    assert how.gram(X.reshape(3, 5, 7)) is first
    assert how.gram(X.clone()) is not first
    again = how.gram(X)
    X.mul_(1.0)  # Written to in place: what was kept is not of this X any more.
    assert how.gram(X) is not again
    # The same memory read in another order is another input.
    square = torch.randn(1, 4, 4)
    straight = how.gram(square)
    assert how.gram(square.mT) is not straight
    how.forget()
    assert how.gram(square) is not straight


def test_products_of_bf16_are_summed_in_fp32() -> None:
    x, grad = X.bfloat16(), GRAD.bfloat16()
    exact = torch.einsum("bto,bti->boi", grad.double(), x.double()).square().sum((1, 2))
    for norm in ("ghost", "instantiate"):
        found = product_squares(x, grad, Products(norm))  # type: ignore[arg-type]
        assert found.dtype == torch.float32
        assert torch.allclose(found.double(), exact, rtol=1e-6)
    assert wide(torch.float64) == torch.float64


def test_a_gradient_of_zero_has_no_negative_square() -> None:
    grad = torch.zeros(3, 5, 4)
    assert not product_squares(X.float(), grad, Products("ghost")).any()


def test_squares_of_an_embedding() -> None:
    ids = torch.tensor([[1, 1, 2, 1, 0], [5, 4, 3, 2, 1], [0, 0, 0, 0, 0]])
    whole = torch.zeros(3, 6, 4, dtype=torch.float64)
    for row in range(3):
        whole[row].index_add_(0, ids[row], GRAD[row])
    found = embedding_squares(ids, GRAD, 6)
    assert torch.allclose(found, whole.square().sum((1, 2)), rtol=1e-12)
    assert torch.allclose(embedding_squares(ids.int(), GRAD, 6), found)


def test_rows_that_an_embedding_looks_up_of_a_heads_gradient() -> None:
    ids = torch.tensor([[0, 3, 3], [1, 2, 0], [2, 2, 2]])
    whole = torch.einsum("btv,bth->bvh", GRAD, X)
    found = tied_rows(X, GRAD, ids)
    for row in range(3):
        assert torch.allclose(found[row], whole[row][ids[row]])


def test_rows_times_factors() -> None:
    factors = torch.tensor([0.5, 0.0, 1.0])
    spoiled = GRAD.clone()
    spoiled[1] = float("nan")
    good = torch.tensor([True, False, True])
    found = scaled_rows(spoiled, factors, good, GRAD.dtype)
    assert torch.equal(found[0], GRAD[0] * 0.5)
    assert not found[1].any()
    assert torch.equal(found[2], GRAD[2])
    assert without_bad_rows(GRAD, None) is GRAD


def test_factors_are_not_rounded_before_they_multiply() -> None:
    factors = torch.tensor([1 / 3] * 3)
    narrow = GRAD.bfloat16()
    found = scaled_rows(narrow, factors, None, torch.bfloat16)
    exact = narrow.double() / 3
    # Rounded once to the eight digits of bf16; twice would be up to twice as far off.
    assert float(((found.double() - exact).abs() / exact.abs()).max()) <= 2**-8
    wider = scaled_rows(narrow, factors, None, torch.float32)
    assert float(((wider.double() - exact).abs() / exact.abs()).max()) <= 2**-22


def test_only_devices_multiply_sixteen_bits() -> None:
    assert factor_dtype(GRAD) is torch.float64
    assert factor_dtype(GRAD.bfloat16()) is torch.float32
    assert factor_dtype(GRAD.bfloat16().to("meta")) is torch.bfloat16


@pytest.mark.parametrize("tokens", [8, 64])
def test_gradients_that_cancel_are_not_taken_for_smaller_ones(tokens: int) -> None:
    """Equal tokens whose gradients nearly cancel: their products are a million times the square."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, 1, 128, generator=generator).expand(16, tokens, 128).contiguous()
    grad = torch.randn(16, tokens, 96, generator=generator)
    grad -= grad.mean(1, keepdim=True) * (1 - 1e-3)
    exact = product_squares(x.double(), grad.double(), Products("instantiate")).sqrt()
    found = product_squares(x, grad, Products("ghost")).double().sqrt()
    assert float((found / exact).min()) >= 1 - 1e-5
    with patch.object(products, "SLACK", 0):
        bare = product_squares(x, grad, Products("ghost")).double().sqrt()
    assert float((bare / exact).min()) < 1 - 1e-3, "nothing cancels, so nothing was shown"
    # And what does not cancel has the norm that it has.
    grad = torch.randn(16, tokens, 96, generator=generator)
    x = torch.randn(16, tokens, 128, generator=generator)
    exact = product_squares(x.double(), grad.double(), Products("instantiate")).sqrt()
    found = product_squares(x, grad, Products("ghost")).double().sqrt()
    assert float((found / exact - 1).abs().max()) < 1e-6
