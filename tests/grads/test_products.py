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


def linear_layer(dtype: torch.dtype, *, bias: bool = True, rows: Any = None) -> Layer:
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


def input_of(shape: str, dtype: torch.dtype) -> Tensor:
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


def assert_equal(mine: list[Tensor], theirs: list[Tensor]) -> None:
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
    layer, x = linear_layer(dtype, bias=bias), input_of(shape, dtype)
    mine = _run(layer, x, mode, autocast=autocast)
    assert_equal(mine, _run(layer, x, "torch", autocast=autocast))


@pytest.mark.parametrize("mode", ["at once", "split"])
@pytest.mark.parametrize(("dtype", "autocast"), PRECISIONS)
@pytest.mark.parametrize("shape", ["tokens", "batch", "by column"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_transposed_layer_is_torchs_to_the_last_bit(
    bias: bool, shape: str, dtype: torch.dtype, autocast: bool, mode: str
) -> None:
    layer, x = _conv1d(dtype, bias=bias), input_of(shape, dtype)
    mine = _run(layer, x, mode, autocast=autocast)
    assert_equal(mine, _run(layer, x, "torch", autocast=autocast))


@pytest.mark.parametrize("mode", ["at once", "split"])
@pytest.mark.parametrize("bias", [False, True])
def test_some_rows_of_a_layer_are_torchs_to_the_last_bit(bias: bool, mode: str) -> None:
    layer, x = linear_layer(torch.float32, bias=bias, rows=(4, 6)), input_of("batch", torch.float32)
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
    assert_equal(mine, [x.grad, *(param.grad for param in layer.params)])
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
    assert_equal([at_once, weight.grad], [expected, expected])


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
    assert_equal(gradients(WeightGradStore(), again=True), expected)
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
    layer, x = linear_layer(torch.float32), input_of("batch", torch.float32)
    expected = _run(layer, x, "torch")
    with _planted(fault, monkeypatch), pytest.raises(AssertionError):
        assert_equal(_run(layer, x, "split"), expected)
