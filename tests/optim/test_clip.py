"""Norms over the whole model, and clipping by them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from goose_strategy.errors import ConfigError
from goose_strategy.optim.clip import clip_grad_norm, clip_grad_value, gradient_runs
from tests.data_parallel import toy
from tests.data_parallel.toy import Plain, Sharded, Trace, adamw, assert_same, batch
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks


def _backward(driver: Plain, *, scale: float = 1.0, branch: int = 0) -> None:
    driver.backward(driver.forward(driver.rows(batch(0)), branch).square().mean() * scale)


def _norms(driver: Plain) -> None:
    for norm_type in (2.0, 1.0, 3.0, 0.5, math.inf):
        _backward(driver)
        driver.record_gradients()
        driver.clip(1e-2, norm_type)
        driver.record_gradients()
        driver.clip(1e6, norm_type)
        driver.record_gradients()
        driver.optimizer.zero_grad()
    driver.clip(1.0)


def _run(ctx: Context) -> Trace:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    _norms(driver)
    return driver.finish()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_norms_and_clipped_gradients_equal_torchs(world_size: int) -> None:
    driver = Plain(toy.toy(), adamw)
    _norms(driver)
    expected = driver.finish()
    expected.norms.pop()
    traces = run_ranks(_run, world_size)
    for trace in traces:
        assert trace.norms.pop() == 0.0, "no gradients"
        assert_same(trace, expected, rel=1e-12)
        assert trace.norms == traces[0].norms, "to the last bit"


def _values(driver: Plain) -> None:
    _backward(driver)
    if isinstance(driver, Sharded):
        clip_grad_value(driver.zeros, 1e-4)
    else:
        nn.utils.clip_grad_value_(driver.model.parameters(), 1e-4)
    driver.record_gradients()


def _run_values(ctx: Context) -> Trace:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    _values(driver)
    return driver.finish()


def test_values_are_limited_like_torchs() -> None:
    driver = Plain(toy.toy(), adamw)
    _values(driver)
    for trace in run_ranks(_run_values, 2):
        assert_same(trace, driver.finish(), rel=1e-12)


def _nonfinite(ctx: Context, value: float, raises: bool) -> dict[str, Any]:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    _backward(driver)
    # Only one rank sees the value, and that in its own slice.
    if ctx.rank == 1:
        driver.model.outer.weight.grad.fill_(value)
    before = [bucket.grads.own.clone() for bucket in driver.reducer.buckets]
    message, norm = "", torch.zeros(())
    try:
        norm = clip_grad_norm(driver.zeros, driver.mesh, 1e-3, error_if_nonfinite=raises)
    except RuntimeError as error:
        message = str(error)
    after = [bucket.grads.own for bucket in driver.reducer.buckets]
    pairs = zip(before, after, strict=True)
    same = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)
    driver.close()
    return {"message": message, "norm": norm.item(), "same": same}


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_refused_before_anything_changes(value: float) -> None:
    for facts in run_ranks(_nonfinite, 2, value, True):
        assert "none was changed" in facts["message"]
        assert facts["same"]
    ranks = run_ranks(_nonfinite, 2, value, False)
    for facts in ranks:
        assert facts["message"] == ""
        assert not math.isfinite(facts["norm"])
    # The rank whose slices hold nothing else has nothing that could change.
    assert not all(facts["same"] for facts in ranks)


def _wide(ctx: Context) -> tuple[float, float, torch.dtype, torch.dtype]:
    torch.manual_seed(ctx.rank)
    model = nn.Linear(1500, 1500, bias=False)
    driver = Sharded(model, adamw, toy.make_mesh(ctx.world_size), bucket_numel=10**9)
    driver.backward((model.weight * torch.randn_like(model.weight)).sum())
    whole = driver.reducer.full_gradients()["weight"].double().norm().item()
    norm = clip_grad_norm([driver.reducer], driver.mesh, 1e9)
    driver.close()
    double = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    wide = clip_grad_norm([double.reducer], double.mesh, 1.0).dtype
    double.close()
    return norm.item(), whole, norm.dtype, wide


def test_a_norm_of_millions_is_exact_to_fp32() -> None:
    for norm, whole, dtype, wide in run_ranks(_wide, 2):
        assert abs(norm - whole) < 1e-6 * whole
        assert dtype == torch.float32
        assert wide == torch.float64


def _whose(ctx: Context) -> tuple[float, float, float]:
    def two(model: nn.Module) -> list[torch.optim.Optimizer]:
        rest = [*model.outer.parameters(), *model.branch.parameters(), model.gain]
        first = [*model.inner.parameters(), *model.norm.parameters()]
        return [torch.optim.SGD(first, lr=0.1), torch.optim.SGD(rest, lr=0.1)]

    driver = Sharded(toy.toy(), two, toy.make_mesh(ctx.world_size))
    _backward(driver)
    first = clip_grad_norm([driver.zeros[0]], driver.mesh, 1e9).item()
    second = clip_grad_norm([driver.zeros[1]], driver.mesh, 1e9).item()
    both = clip_grad_norm([driver.reducer], driver.mesh, 1e9).item()
    driver.close()
    return first, second, both


def test_one_optimizers_gradients_or_all() -> None:
    for first, second, both in run_ranks(_whose, 2):
        assert first > 0
        assert second > 0
        assert math.hypot(first, second) == pytest.approx(both, rel=1e-12)


def _runs(ctx: Context) -> tuple[list[int], list[int], list[int]]:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(1), bucket_numel=10**9)
    _backward(driver)
    driver.reducer.finalize()
    matrices, _ = driver.reducer.slot_of(driver.model.outer.weight)
    names = [slot.name for slot in matrices.slots]
    assert names == ["branch.1.weight", "branch.0.weight", "outer.weight", "inner.weight"]
    without = [run.numel() for run in gradient_runs(matrices)]
    driver.model.outer.weight.grad = None
    cleared = [run.numel() for run in gradient_runs(matrices)]
    driver.model.outer.weight.grad = torch.zeros_like(driver.model.outer.weight)
    driver.model.branch[1].weight.grad = torch.zeros_like(driver.model.branch[1].weight)
    whole = [run.numel() for run in gradient_runs(matrices)]
    driver.close()
    return without, cleared, whole


def test_cleared_parameters_are_left_out_of_the_runs() -> None:
    without, cleared, whole = run_ranks(_runs, 1)[0]
    # Padding between parameters cuts runs, but does not count.
    assert without == [7 * 61, 150 * 61, 12 * 150]
    assert cleared == [7 * 61, 12 * 150]
    assert len(whole) == 1


def _bad_order(ctx: Context) -> None:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(1))
    clip_grad_norm(driver.zeros, driver.mesh, 1.0, norm_type=0.0)


def test_an_order_that_is_not_positive_is_refused() -> None:
    with pytest.raises(RankFailure, match=r"norm_type=0\.0") as caught:
        run_ranks(_bad_order, 1)
    assert caught.value.kind == ConfigError.__name__


def _recovered(ctx: Context) -> list[float]:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    norms = []
    for value in (1.0, math.nan, 1.0):
        _backward(driver)
        driver.model.outer.weight.grad.mul_(value)
        norms.append(driver.clip(1e-3))
        driver.optimizer.zero_grad()
    driver.close()
    return norms


def test_a_norm_of_nan_does_not_stay() -> None:
    """What lies between parameters was multiplied by NaN, and every later norm was NaN."""
    for first, second, third in run_ranks(_recovered, 2):
        assert math.isnan(second)
        assert third == first
