"""Products and lookups: torch's numbers to the last bit, at once or in two actions."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from goose_strategy.grads import products
from goose_strategy.grads.products import conv1d, embedding, linear
from goose_strategy.grads.store import WeightGradStore

IN, OUT = 33, 17
SHAPES = {
    "tokens": (7, IN),
    "one": (1, 1, IN),
    "batch": (3, 5, IN),
    "four": (2, 3, 5, IN),
    "crossed": (3, 5, IN),
    "by column": (9, IN),
}


class Layer(NamedTuple):
    """Parameters, and the forward that uses them with a store or without."""

    params: list[nn.Parameter]
    forward: Callable[[Tensor, WeightGradStore | None], Tensor]


def _linear(dtype: torch.dtype, *, bias: bool = True, rows: Any = None) -> Layer:
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(OUT, IN, dtype=dtype))]
    params += [nn.Parameter(torch.randn(OUT, dtype=dtype))] * bias

    def forward(x: Tensor, store: WeightGradStore | None) -> Tensor:
        if store is not None:
            return linear(x, *params, store=store, rows=rows)
        own = params if rows is None else [param.narrow(0, *rows) for param in params]
        return functional.linear(x, *own)

    return Layer(params, forward)


def _conv1d(dtype: torch.dtype, *, bias: bool = True) -> Layer:
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(IN, OUT, dtype=dtype))]
    params += [nn.Parameter(torch.randn(OUT, dtype=dtype))] * bias

    def forward(x: Tensor, store: WeightGradStore | None) -> Tensor:
        if store is not None:
            return conv1d(x, params[0], params[1] if bias else None, store=store)
        flat = x.reshape(-1, IN)
        product = torch.addmm(params[1], flat, params[0]) if bias else flat @ params[0]
        return product.view(*x.shape[:-1], OUT)

    return Layer(params, forward)


def _input(shape: str, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(2)
    if shape == "crossed":
        return torch.randn(5, 3, IN, dtype=dtype).transpose(0, 1)
    if shape == "by column":
        return torch.randn(IN, 9, dtype=dtype).t()
    return torch.randn(*SHAPES[shape], dtype=dtype)


def _seed(output: Tensor) -> Tensor:
    """A gradient that is not contiguous."""
    torch.manual_seed(3)
    return torch.randn(OUT, *output.shape[:-1], dtype=output.dtype).movedim(0, -1)


def _run(layer: Layer, x: Tensor, mode: str, *, autocast: bool = False) -> list[Tensor]:
    """Two microbatches; return outputs and every gradient."""
    store = None if mode == "torch" else WeightGradStore()
    found: list[Tensor] = []
    put_off = []
    for param in layer.params:
        param.grad = None
    for scale in (1.0, 0.3):
        leaf = (x * scale).requires_grad_() if x.is_contiguous() else _scaled(x, scale)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = layer.forward(leaf, store)
        if mode == "split":
            before = [param.grad for param in layer.params]
            with store.collecting():
                output.backward(_seed(output))
            assert [param.grad for param in layer.params] == before == [None] * len(before)
            put_off.append(store.take())
        else:
            output.backward(_seed(output))
        found += [output.detach(), leaf.grad]
    for work in put_off:
        work.run()
    return found + [param.grad for param in layer.params]


def _scaled(x: Tensor, scale: float) -> Tensor:
    """Keep the strides."""
    return x.clone(memory_format=torch.preserve_format).mul_(scale).requires_grad_()


def _assert_equal(mine: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert one is not None
        assert one.dtype == other.dtype
        assert torch.equal(one, other), (one - other).abs().max()


PRECISIONS = [
    (torch.float32, False),
    (torch.float64, False),
    (torch.bfloat16, False),
    (torch.float32, True),
]


@pytest.mark.parametrize("mode", ["at once", "split"])
@pytest.mark.parametrize(("dtype", "autocast"), PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_is_torchs_to_the_last_bit(
    bias: bool, shape: str, dtype: torch.dtype, autocast: bool, mode: str
) -> None:
    layer, x = _linear(dtype, bias=bias), _input(shape, dtype)
    mine = _run(layer, x, mode, autocast=autocast)
    _assert_equal(mine, _run(layer, x, "torch", autocast=autocast))


@pytest.mark.parametrize("mode", ["at once", "split"])
@pytest.mark.parametrize(("dtype", "autocast"), PRECISIONS)
@pytest.mark.parametrize("shape", ["tokens", "batch", "by column"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_transposed_layer_is_torchs_to_the_last_bit(
    bias: bool, shape: str, dtype: torch.dtype, autocast: bool, mode: str
) -> None:
    layer, x = _conv1d(dtype, bias=bias), _input(shape, dtype)
    mine = _run(layer, x, mode, autocast=autocast)
    _assert_equal(mine, _run(layer, x, "torch", autocast=autocast))


@pytest.mark.parametrize("mode", ["at once", "split"])
@pytest.mark.parametrize("bias", [False, True])
def test_some_rows_of_a_layer_are_torchs_to_the_last_bit(bias: bool, mode: str) -> None:
    layer, x = _linear(torch.float32, bias=bias, rows=(4, 6)), _input("batch", torch.float32)
    torch.manual_seed(3)
    store = WeightGradStore()
    output = layer.forward(x.requires_grad_(), store)
    assert output.shape == (3, 5, 6)
    seed = torch.randn_like(output)
    if mode == "split":
        with store.collecting():
            output.backward(seed)
        store.take().run()
    else:
        output.backward(seed)
    mine = [x.grad, *(param.grad for param in layer.params)]
    x.grad = None
    for param in layer.params:
        param.grad = None
    layer.forward(x, None).backward(seed)
    _assert_equal(mine, [x.grad, *(param.grad for param in layer.params)])
    assert mine[1][:4].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding", [None, 3])
def test_a_lookup_is_torchs_to_the_last_bit(padding: int | None, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = nn.Parameter(torch.randn(11, 5, dtype=dtype))
    ids = torch.randint(0, 11, (4, 9))
    seed = torch.randn(5, 4, 9).movedim(0, -1).to(dtype)
    functional.embedding(ids, weight, padding).backward(seed)
    expected, weight.grad = weight.grad, None
    store = WeightGradStore()
    embedding(ids, weight, padding, store=store).backward(seed)
    at_once, weight.grad = weight.grad, None
    with store.collecting():
        embedding(ids, weight, padding, store=store).backward(seed)
    assert weight.grad is None
    store.take().run()
    _assert_equal([at_once, weight.grad], [expected, expected])


# -- checkpoints -----------------------------------------------------------------------------------


class _Counts:
    """Counts the matrix products of a forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        real = functional.linear

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            self.number += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(products.functional, "linear", counted)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["at once", "split"])
def test_a_checkpointed_layer_finds_its_own_weight(
    mode: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    x = torch.randn(2, 5, 8)

    def chain(y: Tensor, store: WeightGradStore | None) -> Tensor:
        for param in params:
            y = linear(torch.tanh(y), param, store=store)
        return y

    def gradients(store: WeightGradStore | None, again: bool) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        for param in params:
            param.grad = None
        if again:
            output = checkpoint(chain, leaf, store, use_reentrant=reentrant)
        else:
            output = chain(leaf, store)
        if store is not None and mode == "split":
            with store.collecting():
                output.square().sum().backward()
            assert all(param.grad is None for param in params)
            store.take().run()
        else:
            output.square().sum().backward()
        return [leaf.grad, *(param.grad for param in params)]

    expected = gradients(None, again=False)
    counts = _Counts(monkeypatch)
    _assert_equal(gradients(WeightGradStore(), again=True), expected)
    # The product behind the last tensor that was saved is not computed again, as in torch.
    assert counts.number == (6 if reentrant else 5)


def test_a_checkpoint_keeps_no_input_of_the_layers_inside() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    store = WeightGradStore()
    inner: list[weakref.ref[Tensor]] = []

    def layer(x: Tensor) -> Tensor:
        hidden = x.exp()
        inner.append(weakref.ref(hidden))
        return linear(hidden, weight, store=store)

    output = checkpoint(layer, torch.randn(3, 8, requires_grad=True), use_reentrant=False)
    gc.collect()
    assert inner[0]() is None
    with store.collecting():
        output.sum().backward()
    assert len(store.take()) == 1


# -- what takes part -------------------------------------------------------------------------------


def _pushes(*trainable: bool, x_needs: bool = True) -> tuple[int, list[bool], bool]:
    """Layers pushed, which parameters then have a gradient, and whether x has one."""
    layer = _linear(torch.float32)
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
    layer, store = _linear(torch.float32), WeightGradStore()
    layer.params[0].requires_grad_(False)
    with store.collecting():
        layer.forward(torch.randn(100, IN), store).sum().backward()
    assert store.take().nbytes <= 100 * OUT * 4


def test_a_frozen_weight_runs_torchs_own_function() -> None:
    layer, store = _linear(torch.float32), WeightGradStore()
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
    layer, store = _linear(torch.float32), WeightGradStore()
    x = torch.randn(IN)
    with store.collecting():
        layer.forward(x, store).sum().backward()
    assert len(store.take()) == 0
    assert torch.equal(layer.params[0].grad, x.expand(OUT, IN))


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_may_be_written_to(bias: bool) -> None:
    def gradients(store: WeightGradStore | None) -> list[Tensor]:
        layer = _linear(torch.float32, bias=bias)
        output = layer.forward(_input("batch", torch.float32), store)
        output.clamp_(-1, 1)
        output[..., 0].mul_(2)
        output.sum().backward()
        return [param.grad for param in layer.params]

    _assert_equal(gradients(WeightGradStore()), gradients(None))


def test_a_weight_that_was_written_to_is_refused() -> None:
    layer = _linear(torch.float32)
    output = layer.forward(_input("batch", torch.float32), WeightGradStore())
    with torch.no_grad():
        layer.params[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        output.sum().backward()


def test_autocasts_cast_of_a_weight_stays_differentiable_for_others() -> None:
    layer, x = _linear(torch.float32), _input("batch", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        layer.forward(x, WeightGradStore())
        functional.linear(x, *layer.params).sum().backward()
    assert all(param.grad is not None for param in layer.params)


def test_the_graph_in_front_is_freed_with_the_input_gradients() -> None:
    layer, store = _linear(torch.float32), WeightGradStore()
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


# -- planted errors --------------------------------------------------------------------------------


@contextmanager
def _planted(fault: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    owed = products.ProductOwed
    if fault == "the bias is forgotten":
        parameters = owed.parameters.fget
        monkeypatch.setattr(owed, "parameters", property(lambda s: parameters(s)[:1]))
        compute = owed.compute
        monkeypatch.setattr(owed, "compute", lambda s: compute(s)[:1])
    elif fault == "pushed twice":
        push = WeightGradStore.push
        monkeypatch.setattr(WeightGradStore, "push", lambda s, o: (push(s, o), push(s, o)))
    elif fault == "accumulated at once, too":
        push = WeightGradStore.push

        def both(store: WeightGradStore, one: Any) -> None:
            push(store, one)
            torch.autograd.backward(one.parameters, one.compute())

        monkeypatch.setattr(WeightGradStore, "push", both)
    elif fault == "another microbatch's":
        kept: list[Any] = []
        take = WeightGradStore.take

        def stale(store: WeightGradStore) -> Any:
            kept.append(take(store))
            fresh = products.ProductOwed.__new__(products.ProductOwed)
            source = kept[0]._owed[0]
            for name in products.ProductOwed.__slots__:
                setattr(fresh, name, getattr(source, name))
            return type(kept[0])([fresh])

        monkeypatch.setattr(WeightGradStore, "take", stale)
    yield


@pytest.mark.parametrize(
    "fault",
    [
        "the bias is forgotten",
        "pushed twice",
        "accumulated at once, too",
        "another microbatch's",
    ],
)
def test_a_planted_error_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = _linear(torch.float32), _input("batch", torch.float32)
    expected = _run(layer, x, "torch")
    with _planted(fault, monkeypatch), pytest.raises(AssertionError):
        _assert_equal(_run(layer, x, "split"), expected)
