"""Weights of lower precision under the preset fp32: all but the weights is fp32."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn, optim

from goose_strategy.grads.buffer import GradState
from tests.data_parallel import toy
from tests.data_parallel.toy import Sharded, adamw, batch
from tests.harness.worker import Context
from tests.harness.world import run_ranks

BF16 = torch.bfloat16
FP32 = {"preset": "fp32"}


def _simulated(steps: int, world_size: int) -> dict[str, Tensor]:
    """The same by hand: bf16 weights in the forward, everything else in fp32."""
    model = toy.toy(BF16, branches=1)
    named = dict(model.named_parameters())
    main = {name: nn.Parameter(p.detach().float()) for name, p in named.items()}
    groups = [
        {"params": [main[n] for n, p in named.items() if p.dim() > 1], "weight_decay": 0.2},
        {"params": [main[n] for n, p in named.items() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    groups[1]["lr"] = 3e-3
    optimizer = optim.AdamW(groups, lr=1e-2, fused=True)
    for step in range(steps):
        total = {name: torch.zeros_like(p) for name, p in main.items()}
        for part in range(2):
            for rows in batch(2 * step + part, BF16).chunk(world_size):
                loss = model(rows).square().mean()
                grads = torch.autograd.grad(loss, list(named.values()))
                for name, grad in zip(named, grads, strict=True):
                    total[name] += grad.float() / world_size
        for name, p in main.items():
            p.grad = total[name]
        optimizer.step()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(main[name])
    return {name: p.detach() for name, p in main.items()}


def _trained(ctx: Context) -> tuple[dict[str, Tensor], dict[str, Tensor], set[torch.dtype]]:
    driver = Sharded(toy.toy(BF16, branches=1), adamw, toy.make_mesh(ctx.world_size), zero=FP32)
    for step in range(4):
        for part in range(2):
            x = driver.rows(batch(2 * step + part, BF16))
            driver.backward(driver.forward(x).square().mean(), sync=part == 1)
        driver.optimizer.step()
        driver.optimizer.zero_grad()
    zero = driver.zeros[0]
    dtypes = {v.dtype for state in zero.states.values() for v in state.values()}
    dtypes |= {segment.weight.dtype for segment in zero.segments()}
    main = {}
    for shard in zero.shards:
        for piece in shard.pieces:
            start, stop = piece.within_param(shard.bucket)
            main[f"{piece.slot.name} {start} {stop}"] = shard.main[piece.start : piece.stop].clone()
    weights = {name: p.detach().clone() for name, p in driver.model.named_parameters()}
    driver.close()
    return main, weights, dtypes


@pytest.mark.parametrize("world_size", [1, 2])
def test_everything_but_the_weights_is_fp32(world_size: int) -> None:
    expected = _simulated(4, world_size)
    for main, weights, dtypes in run_ranks(_trained, world_size):
        assert dtypes == {torch.float32}
        assert all(weight.dtype == BF16 for weight in weights.values())
        for place, values in main.items():
            name, start, stop = place.split()
            part = expected[name].flatten()[int(start) : int(stop)]
            assert torch.allclose(values, part, rtol=1e-4, atol=1e-6), name
        for name, weight in weights.items():
            close = (weight.float() - expected[name]).abs() <= expected[name].abs() / 256 + 1e-6
            assert close.all(), "the weight is the rounded main weight"


def _small_steps(ctx: Context) -> tuple[float, float]:
    """Steps below the resolution of bf16 add up in the main weight."""
    model = nn.Linear(8, 8, bias=False).to(BF16)
    nn.init.ones_(model.weight)
    driver = Sharded(
        model,
        lambda m: [optim.SGD(m.parameters(), lr=1e-3)],
        toy.make_mesh(ctx.world_size),
        zero=FP32,
    )
    for _ in range(20):
        driver.backward(model.weight.sum())
        driver.optimizer.step()
        driver.optimizer.zero_grad()
    weight = model.weight[0, 0].item()
    main = driver.zeros[0].shards[0].main[0].item()
    driver.close()
    return weight, main


def test_small_steps_are_not_lost() -> None:
    weight, main = run_ranks(_small_steps, 2)[0]
    assert weight == pytest.approx(0.98, abs=0.004)
    assert main == pytest.approx(0.98, abs=1e-6)


def _written(ctx: Context) -> list[object]:
    driver = Sharded(toy.toy(BF16, branches=1), adamw, toy.make_mesh(ctx.world_size), zero=FP32)

    def step() -> int:
        driver.backward(driver.forward(driver.rows(batch(0, BF16))).square().mean())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            driver.optimizer.step()
        driver.optimizer.zero_grad()
        return len([w for w in caught if "fp32 main weights were rebuilt" in str(w.message)])

    facts: list[object] = [step(), step()]
    state = {name: p + 1 for name, p in driver.model.state_dict().items()}
    driver.model.load_state_dict(state)
    facts += [step(), step()]
    gaps = [(p - state[n]).abs().max().item() < 0.1 for n, p in driver.model.named_parameters()]
    facts.append(all(gaps))
    driver.model.load_state_dict({name: p - 1 for name, p in driver.model.state_dict().items()})
    driver.zeros[0].take_over_weights()
    facts.append(step())
    states = {bucket.grads.state for bucket in driver.reducer.buckets}
    facts.append(states == {GradState.REDUCED})
    driver.close()
    return facts


def test_weights_written_from_outside_are_taken_over_with_one_warning() -> None:
    first, second = run_ranks(_written, 2)
    assert first == [0, 0, 1, 0, True, 0, True]
    assert second[0] == second[1] == second[3] == second[5] == 0
    assert second[4] is True
