"""Direct mode: gradients, and parameters after five steps, equal one process."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from goose_strategy.data_parallel.config import ZeroConfig
from goose_strategy.data_parallel.reducer import Reducer
from goose_strategy.errors import ConfigError
from goose_strategy.grads.buffer import GradState
from goose_strategy.optim.clip import clip_grad_norm
from tests.data_parallel import toy
from tests.data_parallel.toy import STEPS, Plain, Sharded, Trace, adamw, assert_same, batch
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks

Scenario = Callable[..., None]


def ordinary(driver: Plain, dtype: torch.dtype = torch.float64) -> None:
    for step in range(STEPS):
        loss = driver.forward(driver.rows(batch(step, dtype))).square().mean()
        driver.backward(loss)
        driver.record_gradients()
        driver.clip(0.05)
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def accumulated(driver: Plain, dtype: torch.dtype = torch.float64) -> None:
    for step in range(STEPS):
        for part in range(3):
            x = driver.rows(batch(10 * step + part, dtype))
            driver.backward(driver.forward(x).square().mean() / 3, sync=part == 2)
        driver.record_gradients()
        driver.clip(0.05)
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def never_synced(driver: Plain, dtype: torch.dtype = torch.float64) -> None:
    """The step itself has to reduce what accumulated."""
    for step in range(STEPS):
        for part in range(2):
            x = driver.rows(batch(10 * step + part, dtype))
            driver.backward(driver.forward(x).square().mean(), sync=False)
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def two_backwards(driver: Plain, dtype: torch.dtype = torch.float64) -> None:
    """Reduced gradients are opened again, by a synced and by an unsynced backward."""
    for step in range(STEPS):
        for part, sync in enumerate((True, True, False, True)):
            x = driver.rows(batch(10 * step + part, dtype))
            driver.backward(driver.forward(x).square().mean(), sync=sync)
            if part == 1:
                driver.clip(0.05)
        driver.record_gradients()
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def retained(driver: Plain, dtype: torch.dtype = torch.float64) -> None:
    for step in range(STEPS):
        loss = driver.forward(driver.rows(batch(step, dtype))).square().mean()
        driver.backward(loss, retain_graph=True)
        driver.backward(loss)
        driver.record_gradients()
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def reentrant(driver: Plain, dtype: torch.dtype = torch.float64) -> None:
    """A weight used inside and outside of a reentrant checkpoint accumulates twice per backward."""
    model = driver.model
    for step in range(STEPS):
        x = driver.rows(batch(step, dtype)).requires_grad_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inner = checkpoint(lambda y: torch.tanh(model.inner(y)), x, use_reentrant=True)
        loss = inner.square().mean() + model.inner(x).mean() + model(x).square().mean()
        driver.backward(loss)
        driver.record_gradients()
        driver.optimizer.step()
        driver.optimizer.zero_grad()


SCENARIOS: list[Scenario] = [
    ordinary,
    accumulated,
    never_synced,
    two_backwards,
    retained,
    reentrant,
]


def run_sharded(ctx: Context, scenario: Scenario, wanted: Any, options: dict[str, Any]) -> Trace:
    dtype = options.pop("dtype", torch.float64)
    mesh = toy.make_mesh(ctx.world_size)
    driver = Sharded(toy.toy(dtype), wanted, mesh, **options)
    scenario(driver, dtype) if dtype != torch.float64 else scenario(driver)
    return driver.finish()


def reference(scenario: Scenario, wanted: Any = adamw, dtype: torch.dtype = torch.float64) -> Trace:
    driver = Plain(toy.toy(dtype), wanted)
    scenario(driver, dtype) if dtype != torch.float64 else scenario(driver)
    return driver.finish()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_equals_one_process_in_fp64(scenario: Scenario, world_size: int) -> None:
    expected = reference(scenario)
    for trace in run_ranks(run_sharded, world_size, scenario, adamw, {}):
        assert_same(trace, expected, rel=1e-11)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("scenario", [ordinary, accumulated], ids=lambda s: s.__name__)
def test_equals_one_process_in_fp32(scenario: Scenario, world_size: int) -> None:
    expected = reference(scenario, dtype=torch.float32)
    options = {"dtype": torch.float32}
    for trace in run_ranks(run_sharded, world_size, scenario, adamw, options):
        assert_same(trace, expected, rel=1e-4)
        for mine, theirs in zip(trace.norms, expected.norms, strict=True):
            assert abs(mine - theirs) <= 1e-6 * theirs


@pytest.mark.parametrize(
    "options", [{"bucket_numel": 10**9}, {"bucket_numel": 1}, {"overlap": False}]
)
def test_sizes_and_overlap_change_nothing(options: dict[str, Any]) -> None:
    expected = reference(ordinary)
    for trace in run_ranks(run_sharded, 2, ordinary, adamw, options):
        assert_same(trace, expected, rel=1e-11)


# -- zero_grad in any order ------------------------------------------------------------------------


def _zeroed(driver: Plain, place: str, to_none: bool) -> None:
    for step in range(STEPS):
        if place == "before forward":
            driver.optimizer.zero_grad(set_to_none=to_none)
        loss = driver.forward(driver.rows(batch(step))).square().mean()
        if place == "between":
            driver.optimizer.zero_grad(set_to_none=to_none)
        driver.backward(loss)
        driver.record_gradients()
        driver.optimizer.step()
        if place == "after step":
            driver.optimizer.zero_grad(set_to_none=to_none)


def _run_zeroed(ctx: Context, place: str, to_none: bool) -> Trace:
    mesh = toy.make_mesh(ctx.world_size)
    driver = Sharded(toy.toy(), adamw, mesh)
    _zeroed(driver, place, to_none)
    return driver.finish()


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("place", ["before forward", "between", "after step"])
def test_zero_grad_may_come_at_any_time(place: str, to_none: bool) -> None:
    driver = Plain(toy.toy(), adamw)
    _zeroed(driver, place, to_none)
    expected = driver.finish()
    for trace in run_ranks(_run_zeroed, 2, place, to_none):
        assert_same(trace, expected, rel=1e-11)


def _one_cleared(driver: Plain) -> None:
    """One slot of a reduced bucket is cleared by hand, and then accumulated into again."""
    for step in range(STEPS):
        driver.backward(driver.forward(driver.rows(batch(step))).square().mean())
        driver.model.inner.weight.grad = None
        driver.model.outer.bias.grad = None
        x = driver.rows(batch(step + 50))
        driver.backward(driver.model.inner(x).square().mean(), sync=step % 2 == 0)
        driver.record_gradients()
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def test_one_slot_may_be_cleared() -> None:
    expected = reference(_one_cleared)
    for trace in run_ranks(run_sharded, 4, _one_cleared, adamw, {}):
        assert_same(trace, expected, rel=1e-11)


def _scaled_by_hand(driver: Plain) -> None:
    """``p.grad`` replaced by another tensor, changed in place, and assigned on an empty slot."""
    for step in range(STEPS):
        driver.backward(driver.forward(driver.rows(batch(step))).square().mean())
        for name, p in driver.model.named_parameters():
            if p.grad is None:
                p.grad = torch.full_like(p, 0.01)
            elif "bias" in name:
                p.grad = p.grad * 0.5
            else:
                p.grad.mul_(0.25)
        driver.record_gradients()
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def test_gradients_may_be_changed_by_hand() -> None:
    expected = reference(_scaled_by_hand)
    for trace in run_ranks(run_sharded, 2, _scaled_by_hand, adamw, {}):
        assert_same(trace, expected, rel=1e-11)


# -- what must fail, and what is left behind -------------------------------------------------------


def _planted(ctx: Context, fault: str) -> Trace:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    buffers = [bucket.grads for bucket in driver.reducer.buckets]
    if fault == "no average":
        for buffer in buffers:
            buffer._replicas = 1
    if fault == "stale slices counted":
        type(buffers[0])._spread, kept = lambda self, kept: None, type(buffers[0])._spread
    try:
        (two_backwards if fault == "stale slices counted" else ordinary)(driver)
    finally:
        if fault == "stale slices counted":
            type(buffers[0])._spread = kept
    return driver.finish()


@pytest.mark.parametrize("fault", ["no average", "stale slices counted"])
def test_a_planted_fault_is_found(fault: str) -> None:
    expected = reference(two_backwards if fault == "stale slices counted" else ordinary)
    for trace in run_ranks(_planted, 2, fault):
        with pytest.raises(AssertionError):
            assert_same(trace, expected, rel=1e-11)


def _closed(ctx: Context) -> bool:
    model = toy.toy()
    driver = Sharded(model, adamw, toy.make_mesh(ctx.world_size))
    ordinary(driver)
    trace = driver.finish()
    same = all(torch.equal(p, trace.parameters[n]) for n, p in model.named_parameters())
    own = len({p.untyped_storage().data_ptr() for p in model.parameters()})
    model(batch(0)).square().mean().backward()
    plain = toy.toy()
    plain.load_state_dict(model.state_dict())
    plain(batch(0)).square().mean().backward()
    gone = weakref.ref(driver.reducer)
    del driver
    gc.collect()
    grads = torch.equal(model.inner.weight.grad, plain.inner.weight.grad)
    return same and grads and own == len(list(model.parameters())) and gone() is None


def test_close_leaves_an_ordinary_module() -> None:
    assert run_ranks(_closed, 2) == [True, True]


def _shared(ctx: Context) -> int:
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    mesh = toy.make_mesh(ctx.world_size)
    reducer = Reducer(
        list(model.named_parameters(remove_duplicate=False)),
        {},
        mesh,
        config=ZeroConfig(),
        average=False,
        owner_of={},
    )
    model[1](model[0](torch.ones(1, 3))).sum().backward()
    reducer.finish_backward()
    states = {bucket.grads.state for bucket in reducer.buckets}
    assert states == {GradState.REDUCED}
    names = len(reducer.full_gradients())
    reducer.close()
    mesh.close()
    return names


def test_a_shared_parameter_counts_once() -> None:
    assert run_ranks(_shared, 1) == [3]


def _summed(ctx: Context) -> float:
    model, mesh = toy.toy(branches=1), toy.make_mesh(ctx.world_size)
    named = list(model.named_parameters())
    reducer = Reducer(named, {}, mesh, config=ZeroConfig(), average=False, owner_of={})
    for sync in (True, False, True):
        reducer.sync = sync
        rows = batch(0).chunk(ctx.world_size)[ctx.rank]
        model(rows).square().sum().backward()
        reducer.finish_backward()
    plain = toy.toy(branches=1)
    for _ in range(3):
        plain(batch(0)).square().sum().backward()
    mine = reducer.full_gradients()
    reducer.close()
    mesh.close()
    return toy.largest_gap(mine, {n: p.grad for n, p in plain.named_parameters()})


def test_gradients_may_be_summed_instead_of_averaged() -> None:
    assert max(run_ranks(_summed, 4)) < 1e-12


def _nothing_to_train(ctx: Context) -> float:
    model, mesh = toy.toy().requires_grad_(False), toy.make_mesh(ctx.world_size)
    named = list(model.named_parameters())
    reducer = Reducer(named, {}, mesh, config=ZeroConfig(), average=True, owner_of={})
    reducer.finish_backward()
    call = reducer.end_call(reducer.begin_call(sync=True))
    reducer.release(call, 0.5)
    norm = clip_grad_norm([reducer], mesh, 1.0).item()
    assert reducer.full_gradients() == {}
    reducer.close()
    mesh.close()
    return norm


def test_a_stage_may_have_nothing_to_train() -> None:
    assert run_ranks(_nothing_to_train, 2) == [0.0, 0.0]


def _complex(ctx: Context) -> None:
    param = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    mesh = toy.make_mesh(ctx.world_size)
    Reducer([("p", param)], {}, mesh, config=ZeroConfig(), average=False, owner_of={})


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(RankFailure, match=r"'p' has dtype=torch\.complex64") as caught:
        run_ranks(_complex, 1)
    assert caught.value.kind == ConfigError.__name__


def _narrow(ctx: Context) -> tuple[list[str], list[torch.dtype], bool]:
    options = {"zero": {"grads": "bf16"}}
    driver = Sharded(toy.toy(torch.bfloat16), adamw, toy.make_mesh(ctx.world_size), **options)
    x = driver.rows(batch(0, torch.bfloat16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        driver.backward(driver.forward(x).square().mean(), sync=False)
        driver.backward(driver.forward(x).square().mean(), sync=False)
        driver.backward(driver.forward(x).square().mean())
    dtypes = [p.grad.dtype for p in driver.model.parameters() if p.grad is not None]
    dtypes += [bucket.grads.flat.dtype for bucket in driver.reducer.buckets]
    driver.optimizer.step()
    moved = all(p.isfinite().all().item() for p in driver.model.parameters())
    driver.close()
    return [str(w.message) for w in caught], dtypes, moved


def test_gradients_in_bf16_are_warned_of_once_where_they_accumulate() -> None:
    first, second = run_ranks(_narrow, 2)
    assert len(first[0]) == 1
    assert "grads='bf16' rounds" in first[0][0]
    assert second[0] == []
    for _, dtypes, moved in (first, second):
        assert set(dtypes) == {torch.bfloat16}
        assert moved
