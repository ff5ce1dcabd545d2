"""Which layers push, and what a layer that pushes leaves as it was."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from goose_strategy.grads.products import embedding, linear
from goose_strategy.grads.store import WeightGradStore
from tests.grads.test_products import IN, OUT, assert_equal, input_of, linear_layer


def _pushes(*trainable: bool, x_needs: bool = True) -> tuple[int, list[bool], bool]:
    """Layers pushed, which parameters then have a gradient, and whether x has one."""
    layer = linear_layer(torch.float32)
    for param, wanted in zip(layer.params, trainable, strict=True):
        param.requires_grad_(wanted)
    store = WeightGradStore()
    x = torch.randn(4, IN, requires_grad=x_needs)
    with store.collecting():
        output = layer.forward(x, store)
        if output.requires_grad:
            output.sum().backward()
    work = store.take()
    pushed = len(work)
    work.run()
    return pushed, [param.grad is not None for param in layer.params], x.grad is not None


def test_frozen_parameters_push_nothing() -> None:
    assert _pushes(True, True) == (1, [True, True], True)
    assert _pushes(True, True, x_needs=False) == (1, [True, True], False)
    assert _pushes(True, False) == (1, [True, False], True)
    assert _pushes(False, True) == (1, [False, True], True)
    assert _pushes(False, False) == (0, [False, False], True)


def test_only_the_weight_keeps_the_input() -> None:
    layer, store = linear_layer(torch.float32), WeightGradStore()
    layer.params[0].requires_grad_(False)
    with store.collecting():
        layer.forward(torch.randn(100, IN), store).sum().backward()
    assert store.take().nbytes <= 100 * OUT * 4


def test_a_frozen_weight_runs_torchs_own_function() -> None:
    layer, store = linear_layer(torch.float32), WeightGradStore()
    for param in layer.params:
        param.requires_grad_(False)
    output = layer.forward(torch.randn(2, 3, IN, requires_grad=True), store)
    assert "Product" not in type(output.grad_fn).__name__
    with torch.no_grad():
        assert not layer.forward(torch.randn(2, IN), store).requires_grad


def test_parameters_that_were_computed_are_left_to_autograd() -> None:
    base, store = nn.Parameter(torch.randn(OUT, IN)), WeightGradStore()
    with store.collecting():
        linear(torch.randn(4, IN), base * 2, store=store).sum().backward()
        embedding(torch.tensor([1, 2]), base * 2, None, store=store).sum().backward()
    assert len(store.take()) == 0
    assert base.grad is not None


def test_an_input_without_rows_is_left_to_autograd() -> None:
    layer, store = linear_layer(torch.float32), WeightGradStore()
    x = torch.randn(IN)
    with store.collecting():
        layer.forward(x, store).sum().backward()
    assert len(store.take()) == 0
    assert torch.equal(layer.params[0].grad, x.expand(OUT, IN))


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_may_be_written_to(bias: bool) -> None:
    def gradients(store: WeightGradStore | None) -> list[Tensor]:
        layer = linear_layer(torch.float32, bias=bias)
        output = layer.forward(input_of("batch", torch.float32), store)
        output.clamp_(-1, 1)
        output[..., 0].mul_(2)
        output.sum().backward()
        return [param.grad for param in layer.params]

    assert_equal(gradients(WeightGradStore()), gradients(None))


def test_a_weight_that_was_written_to_is_refused() -> None:
    layer = linear_layer(torch.float32)
    output = layer.forward(input_of("batch", torch.float32), WeightGradStore())
    with torch.no_grad():
        layer.params[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        output.sum().backward()


def test_autocasts_cast_of_a_weight_stays_differentiable_for_others() -> None:
    layer, x = linear_layer(torch.float32), input_of("batch", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        layer.forward(x, WeightGradStore())
        functional.linear(x, *layer.params).sum().backward()
    assert all(param.grad is not None for param in layer.params)


def test_the_graph_in_front_is_freed_with_the_input_gradients() -> None:
    layer, store = linear_layer(torch.float32), WeightGradStore()
    before = torch.randn(4, IN, requires_grad=True)
    hidden = before.exp()
    freed = weakref.ref(hidden)
    with store.collecting():
        layer.forward(hidden, store).sum().backward()
    del hidden
    gc.collect()
    assert freed() is None, "the input's values are kept, not the tensor with its graph"
    store.take().run()
    assert layer.params[0].grad is not None


def test_hooks_on_a_weight_are_not_called_with_the_input_gradients() -> None:
    layer, store = linear_layer(torch.float32), WeightGradStore()
    seen: list[str] = []
    for param in layer.params:
        param.register_hook(lambda grad: seen.append("before") or grad.clone())
        param.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    with store.collecting():
        layer.forward(input_of("batch", torch.float32), store).sum().backward()
    assert seen == []
    store.take().run()
    assert seen == ["before", "after"] * 2
    layer.forward(input_of("batch", torch.float32), store).sum().backward()
    assert seen == ["before", "after"] * 4


def test_a_weight_that_is_used_past_the_layer_loses_nothing() -> None:
    """That part of its gradient comes with the input gradients."""
    layer, store = linear_layer(torch.float64, bias=False), WeightGradStore()
    x, weight = input_of("batch", torch.float64), layer.params[0]
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    with store.collecting():
        (layer.forward(x, store).sum() + functional.linear(x, weight).square().sum()).backward()
    assert len(seen) == 1
    store.take().run()
    assert len(seen) == 2
    mine, weight.grad = weight.grad, None
    (functional.linear(x, weight).sum() + functional.linear(x, weight).square().sum()).backward()
    torch.testing.assert_close(mine, weight.grad, rtol=1e-12, atol=1e-12)
