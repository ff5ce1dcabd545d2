"""A parameter that is spread over the samples has the gradients of its samples."""

from __future__ import annotations

import pytest
import torch

from goose_strategy.errors import PrivacyError
from goose_strategy.grads.samples import SampleOwed, add_bias, per_sample
from goose_strategy.grads.store import WeightGradStore


def test_gradients_are_those_of_single_rows() -> None:
    store = WeightGradStore(per_sample=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 4, 2, 5, dtype=torch.float64)
    grad = torch.randn_like(x)
    with store.collecting():
        (x * per_sample(weight, x, store)).backward(grad)
    work = store.take()
    (owed,) = work.owed
    assert isinstance(owed, SampleOwed)
    assert weight.grad is None
    for row in range(3):
        (expected,) = torch.autograd.grad((x[row] * weight * grad[row]).sum(), weight)
        assert torch.allclose(owed.grad[row], expected)
    work.run()
    assert torch.allclose(weight.grad, (x * grad).sum((0, 1, 2)))  # type: ignore[arg-type]


def test_a_bias_is_added_once_in_place_and_per_sample_otherwise() -> None:
    bias = torch.randn(4, requires_grad=True)
    output = torch.randn(2, 3, 4)
    expected = output + bias
    assert torch.equal(add_bias(output.clone(), bias, store=None), expected)
    store = WeightGradStore(per_sample=True)
    with store.collecting():
        made = add_bias(output, bias, store=store)
        made.sum().backward()
    assert torch.equal(made, expected)
    assert store.take().owed[0].held[0].shape == (2, 4)
    assert not torch.equal(output, expected), "not in place"


def test_nothing_is_spread_where_no_gradient_is_wanted() -> None:
    store = WeightGradStore(per_sample=True)
    x = torch.randn(2, 3)
    frozen = torch.randn(3)
    assert per_sample(frozen, x, store) is frozen
    wanted = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        assert per_sample(wanted, x, store) is wanted


def test_samples_that_cannot_be_told_apart_are_refused() -> None:
    store = WeightGradStore(per_sample=True)
    weight = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="no dimension for the samples"):
        per_sample(weight, torch.randn(3), store)


def test_a_backward_that_nobody_collects_is_refused() -> None:
    store = WeightGradStore(per_sample=True)
    weight = torch.randn(3, requires_grad=True)
    x = torch.randn(2, 3)
    with pytest.raises(PrivacyError, match="outside of model"):
        (x * per_sample(weight, x, store)).sum().backward()
    assert weight.grad is None
