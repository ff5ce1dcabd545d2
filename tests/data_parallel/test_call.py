"""Calls: gradients of pipelined calls are owned by the call until the user's backward comes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor

from goose_strategy.errors import BatchError
from goose_strategy.grads.buffer import GradState
from tests.data_parallel import toy
from tests.data_parallel.test_reducer import reference, run_sharded
from tests.data_parallel.toy import STEPS, Plain, Sharded, adamw, assert_same, batch
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks

MICROBATCHES = 3


def losses(driver: Plain, seed: int, branch: int = 0) -> Callable[[], Iterator[Tensor]]:
    def microbatches() -> Iterator[Tensor]:
        for part in range(MICROBATCHES):
            x = driver.rows(batch(10 * seed + part))
            yield driver.forward(x, branch).square().mean() / MICROBATCHES

    return microbatches


def _stepped(driver: Plain) -> None:
    driver.record_gradients()
    driver.clip(0.05)
    driver.optimizer.step()
    driver.optimizer.zero_grad()


def ordinary(driver: Plain) -> None:
    for step in range(STEPS):
        driver.release(driver.call(losses(driver, step)))
        _stepped(driver)


def scaled(driver: Plain) -> None:
    for step in range(STEPS):
        driver.release(driver.call(losses(driver, step)), 0.5)
        _stepped(driver)


def accumulated_unsynced(driver: Plain) -> None:
    """What ``accumulate_grad_batches=3`` does: only the last call syncs."""
    for step in range(STEPS):
        for part in range(3):
            call = driver.call(losses(driver, 3 * step + part), sync=part == 2)
            driver.release(call, 1 / 3)
        _stepped(driver)


def accumulated_synced(driver: Plain) -> None:
    for step in range(STEPS):
        for part in range(3):
            driver.release(driver.call(losses(driver, 3 * step + part)), 0.5 + part)
        _stepped(driver)


def mixed(driver: Plain) -> None:
    """Synced and unsynced calls follow each other in every order; the step reduces the rest."""
    for step in range(STEPS):
        for part, sync in enumerate((True, False, False, True, False)):
            driver.release(driver.call(losses(driver, 5 * step + part), sync=sync), 0.5)
        _stepped(driver)


def outstanding(driver: Plain) -> None:
    """Two forwards, then one backward through both, in the other order, with other factors."""
    for step in range(STEPS):
        first = driver.call(losses(driver, 2 * step), sync=step != 1)
        second = driver.call(losses(driver, 2 * step + 1), sync=step != 2)
        driver.release(second, -0.5)
        driver.release(first, 2.0)
        _stepped(driver)


def dropped(driver: Plain) -> None:
    """A call whose backward never comes leaves no trace, before and after a call that counts."""
    for step in range(STEPS):
        driver.call(losses(driver, 77), sync=step % 2 == 0)
        kept = driver.call(losses(driver, step))
        driver.call(losses(driver, 78), sync=step % 2 == 1)
        driver.release(kept, 0.75)
        _stepped(driver)


def cleared_between(driver: Plain, *, to_none: bool, sync: bool) -> None:
    """The Trainer's order: forward, zero_grad, backward. Only the call's gradients remain."""
    for step in range(STEPS):
        driver.release(driver.call(losses(driver, 90 + step), sync=sync))
        call = driver.call(losses(driver, step))
        driver.optimizer.zero_grad(set_to_none=to_none)
        driver.release(call, 0.5)
        driver.record_gradients()
        driver.clip(0.05)
        driver.optimizer.step()


def held_changed(driver: Plain) -> None:
    """What was released before is the user's between a call and its backward."""
    for step in range(STEPS):
        driver.release(driver.call(losses(driver, 2 * step)))
        call = driver.call(losses(driver, 2 * step + 1), sync=step % 2 == 0)
        driver.model.outer.weight.grad.mul_(0.5)
        driver.model.norm.weight.grad = None
        driver.release(call)
        _stepped(driver)


def routed(driver: Plain) -> None:
    """Calls use different branches; the union of both is in the step."""
    for step in range(STEPS):
        driver.release(driver.call(losses(driver, 2 * step, step % 2), sync=step % 3 == 0))
        if step % 2:
            driver.release(driver.call(losses(driver, 2 * step + 1, 0)), 0.5)
        _stepped(driver)


def beside_direct(driver: Plain) -> None:
    """A penalty on the weights reaches them past the call, before and after its release."""

    def penalty() -> Tensor:
        return driver.model.inner.weight.square().sum() + driver.model.gain.square()

    for step in range(STEPS):
        call = driver.call(losses(driver, step), sync=step != 2)
        driver.backward(penalty())
        driver.release(call, 0.5)
        driver.backward(penalty())
        _stepped(driver)


SCENARIOS = [
    ordinary,
    scaled,
    accumulated_unsynced,
    accumulated_synced,
    mixed,
    outstanding,
    dropped,
    held_changed,
    routed,
    beside_direct,
]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_equals_one_process(scenario: Callable[[Plain], None], world_size: int) -> None:
    expected = reference(scenario)
    for trace in run_ranks(run_sharded, world_size, scenario, adamw, {}):
        assert_same(trace, expected, rel=1e-11)


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_may_come_between_call_and_release(to_none: bool, sync: bool) -> None:
    scenario = partial(cleared_between, to_none=to_none, sync=sync)
    expected = reference(scenario)
    for trace in run_ranks(run_sharded, 2, scenario, adamw, {}):
        assert_same(trace, expected, rel=1e-11)


@pytest.mark.parametrize("options", [{"overlap": False}, {"bucket_numel": 1}])
def test_sizes_and_overlap_change_nothing(options: dict[str, object]) -> None:
    expected = reference(mixed)
    for trace in run_ranks(run_sharded, 2, mixed, adamw, options):
        assert_same(trace, expected, rel=1e-11)


def _device_factor(ctx: Context) -> float:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    driver.release(driver.call(losses(driver, 0)), 0.25)
    first = driver.reducer.full_gradients()
    driver.optimizer.zero_grad()
    call = driver.call(losses(driver, 0))
    driver.reducer.release(call, torch.tensor(0.25))
    second = driver.reducer.full_gradients()
    driver.close()
    return toy.largest_gap(second, first)


def test_the_factor_may_be_a_tensor() -> None:
    assert run_ranks(_device_factor, 2) == [0.0, 0.0]


# -- storage ---------------------------------------------------------------------------------------


def _storage(ctx: Context) -> list[object]:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    facts: list[object] = []
    call = driver.call(losses(driver, 0))
    facts.append([stash.values for _, stash in call.parts] == [None] * len(call.parts))
    states = {buffer.state for buffer, _ in call.parts}
    facts.append(states <= {GradState.REDUCING, GradState.REDUCED})
    driver.release(call)
    again = driver.call(losses(driver, 1))
    facts.append(all(stash.values.numel() == buffer.own.numel() for buffer, stash in again.parts))
    facts.append(again.held == [])
    driver.release(again)
    local = driver.call(losses(driver, 2), sync=False)
    facts.append(all(stash.values.numel() == buffer.flat.numel() for buffer, stash in local.parts))
    held = [stash.values for _, stash in local.parts]
    del local
    gc.collect()
    facts.append(all(len(gc.get_referrers(values)) == 1 for values in held))
    driver.close()
    return facts


def test_a_call_holds_no_more_than_it_must() -> None:
    assert run_ranks(_storage, 4) == [[True] * 6] * 4


def _overlaps(ctx: Context) -> tuple[int, int]:
    """Buckets under way when the last backward ends, and buckets in all."""
    model = toy.toy(branches=1)
    driver = Sharded(model, adamw, toy.make_mesh(ctx.world_size), bucket_numel=1000)
    reducer = driver.reducer
    call = reducer.begin_call(sync=True)
    early = 0
    parts = list(losses(driver, 0)())
    for part, loss in enumerate(parts):
        with reducer.completing(0) if part == len(parts) - 1 else nullcontext():
            loss.backward()
        started = [b for b in reducer.buckets if b.grads.state is GradState.REDUCING]
        early = len(started) if part == len(parts) - 1 else early + 100 * len(started)
    reducer.end_call(call)
    count = len(reducer.buckets)
    driver.close()
    return early, count


def test_buckets_start_in_the_last_backward_and_not_before() -> None:
    for early, count in run_ranks(_overlaps, 2):
        assert early == count
        assert count > 3


# -- refusals --------------------------------------------------------------------------------------


def _misuse(ctx: Context, how: str) -> None:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    reducer = driver.reducer
    if how == "released twice":
        call = driver.call(losses(driver, 0))
        reducer.release(call)
        reducer.release(call)
    elif how == "began twice":
        reducer.begin_call(sync=True)
        reducer.begin_call(sync=True)
    elif how == "ended another":
        first = driver.call(losses(driver, 0))
        reducer.begin_call(sync=True)
        reducer.end_call(first)
    elif how == "released within":
        first = driver.call(losses(driver, 0))
        reducer.begin_call(sync=True)
        reducer.release(first)
    elif how == "regrouped":
        call = driver.call(losses(driver, 0))
        reducer._dissolve(reducer.buckets)
        reducer.release(call)
    elif how == "stepped within":
        reducer.begin_call(sync=True)
        driver.optimizer.step()
    else:
        driver.release(driver.call(losses(driver, 0)), 1.0 + ctx.rank)
        driver.clip(1.0)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("released twice", "backward was called twice"),
        ("began twice", "before the previous one ended"),
        ("ended another", "another call than the one that is running"),
        ("released within", "released while a call is running"),
        ("regrouped", "were grouped anew before its backward"),
        ("stepped within", "while a pipelined call is running"),
    ],
)
def test_misuse_is_refused(how: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message) as caught:
        run_ranks(_misuse, 1, how)
    assert caught.value.kind == "RuntimeError"


def test_factors_must_be_equal_on_all_ranks() -> None:
    with pytest.raises(RankFailure, match=r"different factors, \[1.0, 2.0\] by rank") as caught:
        run_ranks(_misuse, 2, "factors")
    assert caught.value.kind == BatchError.__name__


def _planted(driver: Plain, *, fault: str) -> None:
    if isinstance(driver, Sharded):
        calls = driver.reducer._calls
        if fault == "held forgotten":
            end = calls.end
            calls.end = lambda call: (call.held.clear(), end(call))
        if fault == "factor ignored":
            release = calls.release
            calls.release = lambda call, factor: release(call, 1.0)
        if fault == "last microbatch missed":
            kept = driver.call
            driver.call = lambda make, *, sync=True: kept(lambda: list(make())[:-1], sync=sync)
    accumulated_synced(driver)


@pytest.mark.parametrize("fault", ["held forgotten", "factor ignored", "last microbatch missed"])
def test_a_planted_fault_is_found(fault: str) -> None:
    expected = reference(accumulated_synced)
    for trace in run_ranks(run_sharded, 2, partial(_planted, fault=fault), adamw, {}):
        with pytest.raises(AssertionError):
            assert_same(trace, expected, rel=1e-11)
