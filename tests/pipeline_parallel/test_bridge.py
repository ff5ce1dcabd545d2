"""The loss of a pipelined call releases its gradients once, scaled, or frees them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from goose_strategy.pipeline_parallel.bridge import attach_loss, is_bridge_loss, reaches_bridge


def test_the_value_stays_and_the_factor_arrives() -> None:
    seen: list[Tensor] = []
    loss = attach_loss(torch.tensor(2.5, dtype=torch.float64), seen.append)
    assert loss.item() == 2.5
    assert loss.requires_grad
    assert loss.dtype == torch.float64
    (loss * 3 / 4).backward()
    assert [factor.item() for factor in seen] == [0.75]
    assert not seen[0].requires_grad


def test_two_calls_in_one_backward() -> None:
    seen: dict[str, float] = {}
    first = attach_loss(torch.tensor(1.0), lambda f: seen.update(first=f.item()))
    second = attach_loss(torch.tensor(2.0), lambda f: seen.update(second=f.item()))
    (first - 2 * second).backward()
    assert seen == {"first": 1.0, "second": -2.0}


def test_a_second_backward_is_refused() -> None:
    loss = attach_loss(torch.tensor(1.0), lambda _: None)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward was called a second time on the loss"):
        loss.backward()


def test_a_dropped_loss_frees_what_the_callback_holds() -> None:
    class Gradients:
        def release(self, factor: Tensor) -> None: ...

    gradients = Gradients()
    alive = weakref.ref(gradients)
    loss = attach_loss(torch.tensor(1.0), gradients.release)
    del gradients
    assert alive() is not None
    del loss
    gc.collect()
    assert alive() is None


def test_a_released_call_frees_them_too() -> None:
    class Gradients:
        def release(self, factor: Tensor) -> None: ...

    gradients = Gradients()
    alive = weakref.ref(gradients)
    loss = attach_loss(torch.tensor(1.0), gradients.release)
    loss.backward()
    del gradients
    gc.collect()
    assert alive() is None
    assert loss.requires_grad


def test_an_error_in_the_callback_arrives() -> None:
    def broken(_: Tensor) -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        attach_loss(torch.tensor(1.0), broken).backward()


def test_works_under_no_grad() -> None:
    with torch.no_grad():
        assert attach_loss(torch.tensor(1.0), lambda _: None).requires_grad


def test_a_bridge_loss_is_recognised_through_arithmetic() -> None:
    loss = attach_loss(torch.tensor(1.0), lambda _: None)
    weight = torch.ones((), requires_grad=True)
    assert is_bridge_loss(loss)
    assert not is_bridge_loss(loss / 2)
    assert reaches_bridge(loss)
    assert reaches_bridge(weight * 2 + loss / 2)
    for other in (weight, weight * 2, loss.detach(), torch.tensor(1.0)):
        assert not reaches_bridge(other)
        assert not is_bridge_loss(other)
