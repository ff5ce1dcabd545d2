"""The store: what is pushed is accumulated once, by its own work, with all hooks."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.grads.store import TOGETHER, WeightGradStore, WeightGradWork


class _Owed:
    """A gradient that is known already, and counts how often it is asked for."""

    def __init__(self, param: Tensor, gradient: Tensor) -> None:
        self.parameters = [param]
        self.held = [gradient]
        self.asked = 0

    def compute(self) -> list[Tensor]:
        self.asked += 1
        assert not torch.is_grad_enabled()
        return [self.held[0].clone()]


def _param(size: int = 3, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, dtype=dtype))


def _collect(store: WeightGradStore, *owed: _Owed) -> WeightGradWork:
    with store.collecting():
        for one in owed:
            store.push(one)
    return store.take()


def test_work_accumulates_what_its_own_block_collected() -> None:
    store, param = WeightGradStore(), _param()
    first = _collect(store, _Owed(param, torch.ones(3)))
    second = _collect(store, _Owed(param, torch.full((3,), 10.0)))
    assert param.grad is None
    second.run()
    assert param.grad.tolist() == [10.0] * 3
    first.run()
    assert param.grad.tolist() == [11.0] * 3


def test_work_runs_once() -> None:
    param = _param()
    owed = _Owed(param, torch.ones(3))
    work = _collect(WeightGradStore(), owed)
    assert len(work) == 1
    work.run()
    assert (owed.asked, len(work), work.nbytes) == (1, 0, 0)
    with pytest.raises(RuntimeError, match="a second time"):
        work.run()
    assert param.grad.tolist() == [1.0] * 3


def test_a_block_that_pushed_nothing_leaves_work_that_does_nothing() -> None:
    work = _collect(WeightGradStore())
    assert (len(work), work.nbytes) == (0, 0)
    work.run()


def test_hooks_see_one_accumulation_and_may_change_it() -> None:
    param = _param()
    seen: list[list[float]] = []
    param.register_hook(lambda grad: grad * 2)
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    _collect(WeightGradStore(), _Owed(param, torch.ones(3)), _Owed(param, torch.ones(3))).run()
    assert seen == [[4.0] * 3], "one sum per parameter, as in one backward"


def test_a_shared_parameter_is_summed_in_the_order_of_autograd() -> None:
    values = [torch.randn(50, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    mine, other, theirs = _param(50), _param(50), _param(50)
    mine.grad, theirs.grad = values[3].clone(), values[3].clone()
    pushed = [_Owed(mine, values[0]), _Owed(other, values[0]), _Owed(mine, values[1])]
    _collect(WeightGradStore(), *pushed, _Owed(mine, values[2])).run()
    # Autograd adds what reaches a leaf, last use first, before it adds that to its gradient.
    sum((theirs * value).sum() for value in values[2::-1]).backward()
    assert not torch.equal(theirs.grad, values[3] + values[0] + values[1] + values[2])
    assert torch.equal(mine.grad, theirs.grad)
    assert torch.equal(other.grad, values[0])


def test_gradients_are_added_in_place_in_the_accumulators_precision() -> None:
    param = _param(dtype=torch.bfloat16)
    param.grad_dtype = torch.float32
    view = torch.full((3,), 256.0)
    param.grad = view
    one = torch.ones(3, dtype=torch.bfloat16)
    _collect(WeightGradStore(), _Owed(param, one)).run()
    assert param.grad is view
    assert view.tolist() == [257.0] * 3, "bf16 has no 257"


def test_what_was_held_is_freed_layer_by_layer_and_with_the_work() -> None:
    large = [_param(TOGETHER) for _ in range(3)]
    owed = [_Owed(param, torch.ones(TOGETHER)) for param in large]
    gone = [weakref.ref(one.held[0]) for one in owed]
    alive: list[int] = []
    for param in large:
        param.register_hook(lambda _: alive.append(sum(ref() is not None for ref in gone)))
    work = _collect(WeightGradStore(), *owed)
    del owed
    assert work.nbytes == 3 * TOGETHER * 4
    work.run()
    assert alive == [2, 1, 0]
    dropped = _Owed(large[0], torch.ones(3))
    kept = weakref.ref(dropped.held[0])
    work = _collect(WeightGradStore(), dropped)
    del dropped
    assert kept() is not None
    del work
    gc.collect()
    assert kept() is None


def test_a_storage_counts_once() -> None:
    shared = torch.ones(10)
    work = _collect(WeightGradStore(), _Owed(_param(), shared[:3]), _Owed(_param(), shared[3:6]))
    assert work.nbytes == 40


def test_two_backwards_cannot_be_mixed() -> None:
    store, param = WeightGradStore(), _param()
    with pytest.raises(RuntimeError, match="pushed while none are collected"):
        store.push(_Owed(param, torch.ones(3)))
    with store.collecting():
        with pytest.raises(RuntimeError, match="another block is open"), store.collecting():
            pass
        with pytest.raises(RuntimeError, match="taken while they are collected"):
            store.take()
        store.push(_Owed(param, torch.ones(3)))
    with pytest.raises(RuntimeError, match="left 1 layers' that nobody took"), store.collecting():
        pass
    assert len(store.take()) == 1


def test_a_block_that_raised_leaves_nothing() -> None:
    store = WeightGradStore()

    def fail() -> None:
        with store.collecting():
            store.push(_Owed(_param(), torch.ones(3)))
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        fail()
    assert not store.active
    assert len(_collect(store)) == 0
