from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from cuda_ops.bench.cases import (
    SEGMENTS,
    Variant,
    equal_bits,
    gradients,
    initial,
    new_shard,
    new_state,
)
from cuda_ops.layout import BLOCK, Main, Moment, Segment, Segments, Shard, chunks_of, rounding_key
from cuda_ops.reference import step as step_module
from cuda_ops.reference.calls import Reference
from cuda_ops.state import Algorithm, Hyper, StepState

NUMEL = 2048 + 64 * 3
BORDER = 1024
REFERENCE = Reference()

Make = Callable[[list[dict[str, Any]]], Optimizer]


def against_torch(make: Make, algorithm: Algorithm, *groups: dict[Hyper, float]) -> float:
    """Step two groups 50 times with clipping; return the largest difference of the weights."""
    weights = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)) * 0.02
    params = [torch.nn.Parameter(part.clone()) for part in weights.split([BORDER, NUMEL - BORDER])]
    optimizer = make([{"params": [p]} for p in params])
    state = StepState.allocate(algorithm, 2)
    for row, group in enumerate(groups):
        for column, value in group.items():
            state.hyper[row, column] = value
    adam = algorithm == Algorithm.ADAM
    momentum = Moment.FP32 if adam or groups[0].get(Hyper.BETA1) else Moment.NONE
    shard = Shard.allocate(
        NUMEL,
        main=Main.FP32,
        exp_avg=momentum,
        exp_avg_sq=Moment.FP32 if adam else Moment.NONE,
        rest=weights.clone(),
    )
    segments = Segments.build(NUMEL, [Segment(start=0), Segment(start=BORDER, group=1)])
    partials = torch.empty(chunks_of(NUMEL), dtype=torch.float64)
    norm2 = torch.empty(1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        grad = torch.randn(NUMEL, generator=generator) * 1e-2
        for param, part in zip(params, grad.split([BORDER, NUMEL - BORDER]), strict=True):
            param.grad = part.clone()
        norm = torch.nn.utils.clip_grad_norm_(params, 0.3)
        optimizer.step()
        REFERENCE.sum_of_squares(grad, segments, partials)
        REFERENCE.reduce_partials(partials, norm2)
        REFERENCE.prepare(state, norm2, 0.3, None)
        REFERENCE.step(shard, grad, segments, state)
        assert float(state.norm) == pytest.approx(float(norm), rel=1e-6)
        assert float(state.clip) < 1.0
    assert shard.rest is not None
    moved = (shard.rest - weights).abs().max()
    assert float(moved) > 1e-3
    return float((shard.rest - torch.cat([p.detach() for p in params])).abs().max())


ADAM = {Hyper.BETA1: 0.9, Hyper.BETA2: 0.999, Hyper.EPS: 1e-8}


def test_adamw() -> None:
    groups = [
        ADAM | {Hyper.LR: 1e-3, Hyper.WEIGHT_DECAY: 0.1, Hyper.DECOUPLED: 1},
        ADAM | {Hyper.LR: 2e-3, Hyper.WEIGHT_DECAY: 0.0, Hyper.DECOUPLED: 1},
    ]

    def make(params: list[dict[str, Any]]) -> Optimizer:
        params[0] |= {"lr": 1e-3, "weight_decay": 0.1}
        params[1] |= {"lr": 2e-3, "weight_decay": 0.0}
        return AdamW(params)

    assert against_torch(make, Algorithm.ADAM, *groups) < 1e-7


def test_adam_that_maximizes() -> None:
    group = ADAM | {Hyper.LR: 1e-3, Hyper.WEIGHT_DECAY: 0.1, Hyper.SIGN: -1}
    difference = against_torch(
        lambda p: Adam(p, lr=1e-3, weight_decay=0.1, maximize=True), Algorithm.ADAM, group, group
    )
    # Decay in the gradient is divided by sqrt(v), so its rounding is seen where v is small.
    assert difference < 3e-7


@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)],
)
def test_sgd(momentum: float, dampening: float, nesterov: bool) -> None:
    group = {
        Hyper.LR: 0.1,
        Hyper.BETA1: momentum,
        Hyper.BETA2: dampening,
        Hyper.NESTEROV: float(nesterov),
        Hyper.WEIGHT_DECAY: 0.1,
    }
    difference = against_torch(
        lambda p: SGD(
            p,
            lr=0.1,
            momentum=momentum,
            dampening=dampening,
            nesterov=nesterov,
            weight_decay=0.1,
        ),
        Algorithm.SGD,
        group,
        group,
    )
    assert difference < 1e-7


class Lion(Optimizer):
    """As in the paper (Chen et al. 2023, algorithm 2)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = (beta1 * m + (1 - beta1) * p.grad).sign() + group["decay"] * p.data
                p.data -= group["lr"] * update
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


def test_lion() -> None:
    group = {
        Hyper.LR: 1e-3,
        Hyper.BETA1: 0.9,
        Hyper.BETA2: 0.99,
        Hyper.WEIGHT_DECAY: 0.1,
        Hyper.DECOUPLED: 1,
    }
    difference = against_torch(
        lambda p: Lion(p, 1e-3, (0.9, 0.99), 0.1), Algorithm.LION, group, group
    )
    assert difference < 1e-7


DEFAULT = Variant(Algorithm.ADAM, Main.SPLIT16, Moment.BF16, Moment.BF16, torch.float32)
COMPACT = Variant(Algorithm.ADAM, Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, torch.float32)
TENSORS = ("weight", "rest", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")


def snapshot(shard: Shard) -> dict[str, torch.Tensor]:
    found = {name: getattr(shard, name) for name in TENSORS}
    return {name: t.clone().view(torch.uint8) for name, t in found.items() if t is not None}


def stepped(variant: Variant, segments: list[Segment], numel: int, steps: int = 3) -> Shard:
    shard, state = new_shard(variant, numel), new_state(variant)
    REFERENCE.split_main(shard, initial(numel))
    table = Segments.build(numel, segments)
    for grad in gradients(variant, 2 * steps, numel)[2::2][:steps]:
        REFERENCE.prepare(state, torch.ones(1, dtype=torch.float64), 0.0, None)
        REFERENCE.step(shard, grad, table, state)
    return shard


@pytest.mark.parametrize("variant", [DEFAULT, COMPACT], ids=["default", "compact"])
def test_a_skipped_step_and_an_inactive_segment_change_nothing(variant: Variant) -> None:
    numel = 4 * BLOCK
    shard, state = new_shard(variant, numel), new_state(variant)
    REFERENCE.split_main(shard, initial(numel))
    (grad,) = gradients(variant, 1, numel)
    before = snapshot(shard)
    table = Segments.build(numel, [Segment(start=0)])
    REFERENCE.prepare(state, torch.full((1,), torch.nan, dtype=torch.float64), 0.0, None)
    REFERENCE.step(shard, grad, table, state)
    assert all(equal_bits(before[name], value) for name, value in snapshot(shard).items())

    REFERENCE.prepare(state, torch.ones(1, dtype=torch.float64), 0.0, None)
    idle = Segments.build(
        numel, [Segment(start=0, group=-1), Segment(start=BLOCK), Segment(start=192, group=-1)]
    )
    REFERENCE.step(shard, grad, idle, state)
    for name, value in snapshot(shard).items():
        old, new = before[name].view(4, -1), value.view(4, -1)
        assert equal_bits(old[[0, 3]], new[[0, 3]]), name
        assert not torch.equal(old[1:3], new[1:3]), name


@pytest.mark.parametrize("variant", [DEFAULT, COMPACT], ids=["default", "compact"])
def test_a_device_skips_without_asking_the_host(variant: Variant) -> None:
    # On a CPU the step returns early; elsewhere the flag masks what is written.
    numel = 4 * BLOCK
    shard, state = new_shard(variant, numel), new_state(variant)
    REFERENCE.split_main(shard, initial(numel))
    (grad,) = gradients(variant, 1, numel)
    table = Segments.build(numel, [Segment(start=0)])
    results = []
    for norm2 in (torch.nan, 1.0):
        before = snapshot(shard)
        REFERENCE.prepare(state, torch.full((1,), norm2, dtype=torch.float64), 0.0, None)
        rows = step_module._look_up(table, state, slice(0, numel), masked=True)
        step_module._step_slice(shard, grad, rows, state)
        after = snapshot(shard)
        results.append([equal_bits(before[name], after[name]) for name in after])
    assert all(results[0])
    assert not any(results[1])


@pytest.mark.parametrize("variant", [DEFAULT, COMPACT], ids=["default", "compact"])
def test_copies_of_a_parameter_stay_equal(variant: Variant) -> None:
    key = rounding_key("lm_head.weight")
    # Once at the start of a shard, once behind another parameter in a larger one.
    alone = stepped(variant, [Segment(start=0, key=key)], 4 * BLOCK)
    table = [Segment(start=0, key=5), Segment(start=2048, key=key)]
    numel = 2048 + 4 * BLOCK
    shard, state = new_shard(variant, numel), new_state(variant)
    weights = torch.cat((torch.zeros(2048), initial(4 * BLOCK)))
    REFERENCE.split_main(shard, weights)
    for grad in gradients(variant, 6, 4 * BLOCK)[2::2][:3]:
        REFERENCE.prepare(state, torch.ones(1, dtype=torch.float64), 0.0, None)
        whole = torch.cat((torch.ones(2048), grad))
        REFERENCE.step(shard, whole, Segments.build(numel, table), state)
    for name in TENSORS:
        tensor = getattr(alone, name)
        if tensor is not None:
            other = getattr(shard, name)[-tensor.numel() :]
            assert equal_bits(tensor, other), name


def test_the_key_and_the_place_decide_the_rounding() -> None:
    base = stepped(COMPACT, [Segment(start=0, key=1)], 4 * BLOCK)
    for other in (Segment(start=0, key=2), Segment(start=0, key=1, first=8)):
        different = stepped(COMPACT, [other], 4 * BLOCK)
        assert base.rest is not None
        assert different.rest is not None
        assert not torch.equal(base.rest, different.rest)


def test_lr_0_moves_no_weight() -> None:
    variant = replace(DEFAULT, main=Main.FP32)
    numel = NUMEL
    shard, state = new_shard(variant, numel), new_state(variant)
    weights = initial(numel)
    REFERENCE.split_main(shard, weights)
    state.hyper[:, Hyper.LR] = 0.0
    REFERENCE.prepare(state, torch.ones(1, dtype=torch.float64), 0.0, None)
    (grad,) = gradients(variant, 1, numel)
    table = [s for s in SEGMENTS if s.start < numel]
    REFERENCE.step(shard, grad, Segments.build(numel, table), state)
    assert shard.rest is not None
    assert torch.equal(shard.rest, weights)
    assert shard.exp_avg is not None
    assert bool((shard.exp_avg != 0).any())


def test_a_slice_border_within_a_shard_makes_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numel = 4 * 2048
    table = [Segment(start=0, key=1), Segment(start=2048 + 64, key=2, group=1)]
    whole = snapshot(stepped(COMPACT, table, numel))
    monkeypatch.setattr(step_module, "_CPU_SLICE", 2048)
    for name, value in snapshot(stepped(COMPACT, table, numel)).items():
        assert equal_bits(value, whole[name]), name


def test_bf16_second_moment_follows_where_the_plain_cast_freezes() -> None:
    numel = 64 * BLOCK
    variant = Variant(Algorithm.ADAM, Main.FP32, Moment.FP32, Moment.BF16, torch.float32)
    shard, state = new_shard(variant, numel), new_state(variant)
    exact, plain = torch.zeros(numel), torch.zeros(numel, dtype=torch.bfloat16)
    table = Segments.build(numel, [Segment(start=0)])
    generator = torch.Generator().manual_seed(0)
    for number in range(2000):
        grad = torch.randn(numel, generator=generator) * (1.0 if number < 300 else 0.1)
        REFERENCE.prepare(state, torch.ones(1, dtype=torch.float64), 0.0, None)
        REFERENCE.step(shard, grad, table, state)
        exact = exact * 0.999 + 0.001 * grad * grad
        plain = (plain.float() * 0.999 + 0.001 * grad * grad).bfloat16()
    assert shard.exp_avg_sq is not None
    ratio = (shard.exp_avg_sq.float() / exact).sqrt()
    assert float(ratio.median()) == pytest.approx(1.0, abs=0.02)
    assert float(ratio.quantile(0.05)) > 0.9
    assert float(ratio.quantile(0.95)) < 1.1
    assert float((plain.float() / exact).sqrt().median()) > 2.0


def test_zeros_in_v_never_meet_a_nonzero_m() -> None:
    numel = 64 * BLOCK
    shard, state = new_shard(COMPACT, numel), new_state(COMPACT)
    table = Segments.build(numel, [Segment(start=0)])
    generator = torch.Generator().manual_seed(0)
    sizes = 10 ** (torch.rand(numel, generator=generator) * 12 - 12)
    for _ in range(50):
        grad = torch.randn(numel, generator=generator) * sizes
        REFERENCE.prepare(state, torch.ones(1, dtype=torch.float64), 0.0, None)
        REFERENCE.step(shard, grad, table, state)
        assert shard.exp_avg is not None
        assert shard.exp_avg_sq is not None
        assert not bool(((shard.exp_avg_sq == 0) & (shard.exp_avg.float() != 0)).any())
