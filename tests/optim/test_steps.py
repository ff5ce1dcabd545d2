"""Steps that are skipped: on all ranks, with nothing written, counted and told."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from goose_strategy.comm.recorder import Recorder, recording
from goose_strategy.errors import BatchError, ConfigError
from goose_strategy.optim.clip import clip_grad_norm
from tests.data_parallel import toy
from tests.data_parallel.toy import Sharded
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks
from tests.optim.narrow import BF16, PRESETS, assign, natives, start


def bits(driver: Sharded) -> list[Tensor]:
    """Return a copy of everything that a step may write, as bytes."""
    tensors = []
    for shard in natives(driver):
        values = [v for v in vars(shard.flat).values() if isinstance(v, Tensor)]
        tensors += [value.view(torch.uint8).clone() for value in values]
    tensors += [p.detach().clone().view(-1).view(torch.uint8) for p in driver.model.parameters()]
    return tensors


def _skipped(ctx: Context, zero: dict[str, Any], value: float, clip: bool) -> dict[str, Any]:
    driver = start(ctx, zero, branches=1)
    (sharded,) = driver.zeros
    said: list[str] = []

    def step(index: int, *, spoilt: bool) -> None:
        assign(driver, index)
        if spoilt and ctx.rank == 1:
            # One element on one rank, of the slice that this rank steps.
            shard = next(shard for shard in natives(driver) if shard.pieces)
            shard.bucket.grads.attached()
            shard.bucket.grads.own[shard.pieces[0].start] = value
        if clip:
            clip_grad_norm(driver.zeros, driver.mesh, 1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            driver.optimizer.step()
        said.extend(str(w.message) for w in caught)
        driver.optimizer.zero_grad()

    step(0, spoilt=False)
    before = bits(driver)
    step(1, spoilt=True)
    step(1, spoilt=True)
    same = all(torch.equal(a, b) for a, b in zip(before, bits(driver), strict=True))
    counted = sharded.native.clock.state.counters.tolist()
    step(1, spoilt=False)
    moved = not all(torch.equal(a, b) for a, b in zip(before, bits(driver), strict=True))
    after = {name: p.detach().clone() for name, p in driver.model.named_parameters()}
    skipped = sharded.native.skipped
    driver.close()
    return {
        "same": same,
        "moved": moved,
        "counted": counted,
        "skipped": skipped,
        "said": said,
        "after": after,
    }


def _unspoilt(ctx: Context, zero: dict[str, Any], clip: bool) -> dict[str, Tensor]:
    driver = start(ctx, zero, branches=1)
    for index in range(2):
        assign(driver, index)
        if clip:
            clip_grad_norm(driver.zeros, driver.mesh, 1.0)
        driver.optimizer.step()
        driver.optimizer.zero_grad()
    return driver.finish().parameters


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("preset", ["default", "compact", "fp32"])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(
    preset: str, value: float, clip: bool
) -> None:
    """DeepSpeed #8415: such a step was skipped without a word, and training looked healthy."""
    zero = PRESETS[preset]
    expected = run_ranks(_unspoilt, 2, zero, clip)[0]
    first, second = run_ranks(_skipped, 2, zero, value, clip)
    for facts in (first, second):
        assert facts["same"]
        assert facts["moved"]
        assert facts["counted"] == [1, 2, 2, 1]
        assert facts["skipped"] == 2
        # A skipped step counts for nothing: neither bias corrections nor random numbers move on.
        assert all(torch.equal(facts["after"][n], p) for n, p in expected.items())
    assert second["said"] == [], "one rank tells"
    assert len(first["said"]) == 2
    assert "1 of 2 so far, 1 in a row" in first["said"][0]
    assert "2 of 3 so far, 2 in a row" in first["said"][1]


def _too_many(ctx: Context) -> int:
    driver = start(ctx, {"preset": "default", "max_skipped": 3}, branches=1)
    driver.mesh.rank = 1  # It is not this rank's to tell.
    for taken in range(10):
        assign(driver, 0)
        driver.model.inner.weight.grad.fill_(math.nan)
        try:
            driver.optimizer.step()
        except BatchError:
            driver.close()
            return taken
    raise AssertionError("ten steps in a row were skipped")


def test_a_run_that_only_skips_is_ended() -> None:
    assert run_ranks(_too_many, 2) == [3, 3]


def test_the_message_says_what_to_look_for() -> None:
    with pytest.raises(RankFailure, match=r"max_skipped=2.*look for the first NaN"):
        run_ranks(_ended, 1)


def _ended(ctx: Context) -> None:
    driver = start(ctx, {"preset": "default", "max_skipped": 2}, branches=1)
    driver.mesh.rank = 1
    for _ in range(5):
        assign(driver, 0)
        driver.model.gain.grad.fill_(math.inf)
        driver.optimizer.step()


def _momentum(ctx: Context) -> None:
    driver = start(ctx, PRESETS["default"], wanted=lambda m: [optim.SGD(m.parameters(), lr=0.1)])
    driver.optimizer.param_groups[0]["momentum"] = 0.9
    assign(driver, 0)
    driver.optimizer.step()


def test_a_momentum_that_comes_later_is_refused() -> None:
    with pytest.raises(RankFailure, match="momentum was 0 when") as caught:
        run_ranks(_momentum, 1)
    assert caught.value.kind == ConfigError.__name__


def _empty(ctx: Context) -> list[int]:
    """A rank that steps nothing, and a step without any gradient."""
    model = nn.Linear(3, 2, bias=False).to(BF16)
    wanted = lambda m: [optim.AdamW(m.parameters(), lr=0.1)]  # noqa: E731
    driver = Sharded(model, wanted, toy.make_mesh(ctx.world_size), zero=PRESETS["default"])
    before = model.weight.detach().clone()
    driver.optimizer.step()
    assert torch.equal(model.weight, before)
    model.weight.grad = torch.ones(2, 3)
    driver.optimizer.step()
    assert not torch.equal(model.weight, before)
    counters = driver.zeros[0].native.clock.state.counters.tolist()
    steps = driver.zeros[0].native.clock.steps.tolist()
    driver.close()
    return [*counters, *steps]


def test_a_rank_that_steps_nothing_counts_with_the_others() -> None:
    """TE #1986: ranks with empty groups did not count, and their bias corrections went apart."""
    ranks = run_ranks(_empty, 4)
    assert ranks[0] == [2, 0, 0, 0, 1]
    assert all(rank[:4] == ranks[0][:4] for rank in ranks)


def _schedule(ctx: Context, native: bool) -> dict[str, Tensor]:
    zero = {"preset": "fp32", "skip_nonfinite": native}
    driver = start(ctx, zero, dtype=torch.float32, branches=1)
    cycle = optim.lr_scheduler.OneCycleLR(driver.optimizer, 1e-2, total_steps=12)
    for index in range(8):
        assign(driver, index)
        driver.optimizer.step()
        driver.optimizer.zero_grad()
        cycle.step()
    return driver.finish().parameters


def test_schedulers_of_the_rate_and_of_the_betas_are_heeded() -> None:
    ours, torchs = (run_ranks(_schedule, 2, native)[0] for native in (True, False))
    for name, value in torchs.items():
        assert (ours[name] - value).norm() <= 1e-6 * value.norm(), name


def _after_the_clip(ctx: Context) -> list[int]:
    """A clipping knows the norm of what was there; what comes later is looked at by the step."""
    driver = start(ctx, PRESETS["default"], branches=1)
    (sharded,) = driver.zeros
    launches = []
    for spoilt in (False, True):
        x = driver.rows(toy.batch(0, BF16))
        driver.backward(driver.forward(x).square().mean())
        clip_grad_norm(driver.zeros, driver.mesh, 1.0)
        if spoilt:
            driver.backward(driver.forward(x).square().mean() * math.nan)
        with recording(Recorder()) as recorder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            driver.optimizer.step()
        launches.append(sum("int64" in str(launch) for launch in recorder.launches))
        driver.optimizer.zero_grad()
    skipped = sharded.native.skipped
    driver.close()
    return [*launches, skipped]


def test_a_clipped_norm_is_not_taken_twice_and_never_taken_for_another() -> None:
    assert run_ranks(_after_the_clip, 2) == [[0, 1, 1]] * 2
