"""Defects that other sharded optimizers had in public, one test each that would fail with it.

Further ones are told in the docstrings of `test_steps.py` (DeepSpeed #8415, TE #1986).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from cuda_ops import ops
from cuda_ops.layout import Main, Moment, Segment, Segments, Shard
from cuda_ops.state import Algorithm, Hyper, StepState
from goose_strategy.optim.segments import is_rounded
from goose_strategy.optim.state import (
    load_named_optimizer_state,
    named_optimizer_state,
    owned_ranges,
    settle_loaded,
)
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from tests.data_parallel import toy
from tests.data_parallel.toy import Sharded, batch
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.optim.narrow import BF16, PRESETS, assign, named, natives, start, train
from tests.parity.grid import Case, assert_parity
from tests.runtime.start import CPU

# -- gradients -------------------------------------------------------------------------------------


def _micro(ctx: Context, parts: int) -> dict[str, Tensor]:
    driver = start(ctx, PRESETS["fp32"], dtype=torch.float32, branches=1)
    rows = driver.rows(batch(0, torch.float32)).chunk(parts)
    for part, x in enumerate(rows):
        driver.backward(driver.forward(x).square().mean() / parts, sync=part == parts - 1)
    gradients = driver.reducer.full_gradients()
    driver.close()
    return gradients


def test_deepspeed_7985_the_last_microbatch_is_summed_like_the_others() -> None:
    """It was added after the all-reduce: a bias of (W - 1) / W of it, which grew with the ranks."""
    for world_size in (1, 4):
        whole, parts = run_ranks(_micro, world_size, 1), run_ranks(_micro, world_size, 4)
        for one, other in zip(whole, parts, strict=True):
            for name, gradient in one.items():
                assert (other[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def test_deepspeed_8154_accumulation_divides_once_on_every_stage() -> None:
    """Every earlier stage divided a gradient again that had been divided on the last one."""
    assert_parity(Case(pp=2, accumulate=3, steps=1))


def test_rocm_te_715_and_nemo_rl_3788_replicated_weights_count_once_in_the_norm() -> None:
    """Norms were 1.36 to 1.52 times too large at tp=8, where clipping acts as a smaller rate."""
    assert_parity(Case(tp=2, max_norm=0.3, steps=2))


# -- steps -----------------------------------------------------------------------------------------


def _two_ages(ctx: Context) -> list[float]:
    first, second = nn.Linear(64, 1, bias=False), nn.Linear(64, 1, bias=False)
    model = nn.ModuleList([first, second])
    for param in model.parameters():
        nn.init.ones_(param)
    wanted = lambda m: [optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.0)]  # noqa: E731
    zero = PRESETS["fp32"]
    driver = Sharded(model, wanted, toy.make_mesh(ctx.world_size), zero=zero)
    for step in range(5):
        first.weight.grad = torch.ones(1, 64)
        second.weight.grad = torch.ones(1, 64) if step == 4 else None
        driver.optimizer.step()
    moved = [1 - first.weight[0, 0].item(), 1 - second.weight[0, 0].item()]
    driver.close()
    return moved


def test_deepspeed_8471_every_parameter_has_a_step_count_of_its_own() -> None:
    """The count of the last one corrected the bias of all."""
    for moved in run_ranks(_two_ages, 2):
        assert moved == pytest.approx([0.5, 0.1], rel=1e-4)


@pytest.mark.parametrize("offset", [2**31, 2**32, 2**40])
def test_deepspeed_7640_apex_1654_te_2918_elements_are_counted_in_64_bits(offset: int) -> None:
    """32-bit sizes wrapped around; DeepSpeed's weights were then silently never updated."""
    results = []
    for first in (0, offset):
        weight = torch.ones(4096, dtype=BF16)
        shard = Shard.allocate(
            4096, main=Main.BF16, exp_avg=Moment.NONE, exp_avg_sq=Moment.NONE, weight=weight
        )
        table = Segments.build(4096, [Segment(start=0, key=7, first=first)])
        state = StepState.allocate(Algorithm.SGD, 1)
        state.hyper[0, Hyper.LR] = 1e-3
        ops.prepare(state, torch.ones(1, dtype=torch.float64))
        ops.step(shard, torch.ones(4096), segments=table, state=state)
        # Half of a step of bf16 at most: some elements move, by random numbers of their own.
        moved = (weight != 1).float().mean().item()
        assert 0.1 < moved < 0.9
        results.append(weight.clone())
    assert not torch.equal(*results), "an offset that is cut off draws the same numbers"


class WithNothing(nn.Module):
    """A module with parameters of no elements before, between and behind others."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 5))
        self.first = nn.Parameter(torch.ones(70))
        self.nothing = nn.Parameter(torch.zeros(0))
        self.second = nn.Parameter(torch.ones(3))
        self.least = nn.Parameter(torch.zeros(4, 0))


def _nothing(ctx: Context, zero: dict[str, Any]) -> bool:
    model = WithNothing().to(BF16)
    wanted = lambda m: [optim.AdamW(m.parameters(), lr=0.5)]  # noqa: E731
    driver = Sharded(model, wanted, toy.make_mesh(ctx.world_size), zero=zero)
    for param in model.parameters():
        param.grad = torch.ones_like(param, dtype=torch.float32 if param.numel() else BF16)
    driver.optimizer.step()
    equal = bool((model.first == model.first[0]).all()) and bool((model.second < 0.6).all())
    # What lies between parameters is nobody's, and stays zero.
    for bucket in driver.reducer.buckets:
        used = torch.zeros(bucket.weights.numel(), dtype=torch.bool)
        for slot in bucket.slots:
            used[slot.start : slot.stop] = True
        equal = equal and not bucket.weights[~used].any()
    driver.close()
    return equal


@pytest.mark.parametrize("preset", ["default", "compact", "fp32"])
def test_te_3202_parameters_without_elements_write_nowhere(preset: str) -> None:
    """One in the last place of a kernel's table made it write behind the end of another tensor."""
    assert run_ranks(_nothing, 4, PRESETS[preset]) == [True] * 4


def _cover(ctx: Context) -> list[tuple[str, int, tuple[int, ...]]]:
    runtime = ParallelRuntime(RuntimeConfig(tp=2, pp=2))
    runtime.start(CPU)
    model = tiny_model("llama", dtype=BF16)
    handle = runtime.shard_module(model, optimizers=[optim.AdamW(model.parameters())])
    (zero,) = handle.shards
    found = []
    for name, (start_, stop) in owned_ranges(zero).items():
        spec = handle.surgery.specs[name]
        if spec.is_sharded or runtime.mesh.tp_rank == 0:
            found.append((name, stop - start_, tuple(spec.global_shape)))
    runtime.stop()
    return found


def test_megatron_6048_every_element_is_stepped_by_somebody_once() -> None:
    """A layout sized by the wrong group had shards of nobody: never stepped, not in the norm."""
    covered: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in run_ranks(_cover, 8):
        for name, elements, shape in rank:
            covered[name] = covered.get(name, 0) + elements
            shapes[name] = shape
    assert covered == {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    assert covered.keys() == dict(tiny_model("llama").named_parameters()).keys()


# -- checkpoints -----------------------------------------------------------------------------------


def _ties(ctx: Context, settle: bool) -> Tensor:
    """Weights whose main weights lie in the middle between two, rounded to the other side."""
    wanted = lambda m: [optim.AdamW(m.parameters())]  # noqa: E731
    model = nn.Linear(64, 64, bias=False).to(BF16)
    driver = Sharded(model, wanted, toy.make_mesh(ctx.world_size), zero={"preset": "fp32"})
    (zero,) = driver.zeros
    with torch.no_grad():
        # One step of bf16 above 1: what a split weight makes of the middle.
        model.weight.fill_(1 + 2**-7)
    state = named_optimizer_state(zero)
    for entries in state.values():
        values, first, last = entries["main"]
        entries["main"] = (torch.full_like(values, 1 + 2**-8), first, last)
    load_named_optimizer_state(zero, state)
    if settle:
        settle_loaded(zero)
    weight = model.weight.detach().clone()
    driver.close()
    return weight


def test_megatron_6920_weights_are_gathered_after_a_load() -> None:
    """Without it a resumed run computes with weights that no rank steps from, without an error."""
    first, second = run_ranks(_ties, 2, True)
    assert torch.equal(first, second)
    assert (first == 1).all(), "each element as its own rank rounds it"
    unsettled = run_ranks(_ties, 2, False)
    assert all((weight == 1 + 2**-7).all() for weight in unsettled)


def _padding(ctx: Context) -> list[tuple[int, int, int]]:
    driver = start(ctx, PRESETS["compact"])
    train(driver, range(1))
    sizes = {name: p.numel() for name, p in driver.model.named_parameters()}
    found = [
        (first, last, sizes[name])
        for name, entries in named(driver).items()
        for _, first, last in [entries["exp_avg"]]
    ]
    for entries in named(driver).values():
        values, first, last = entries["exp_avg"]
        assert len(values) == last - first
    driver.close()
    return found


def test_megatron_5898_padding_is_in_no_checkpoint() -> None:
    """Padding at the end of a bucket was saved, and another number of ranks could not load it."""
    for rank in run_ranks(_padding, 4):
        assert all(0 <= first < last <= size for first, last, size in rank)


def _remainders(ctx: Context, preset: str) -> list[bool]:
    driver = start(ctx, PRESETS[preset])
    facts = []
    for step in range(4):
        assign(driver, step)
        driver.optimizer.step()
        facts += _consistent(driver)
    before = [shard.main_values().clone() for shard in natives(driver)]
    (zero,) = driver.zeros
    load_named_optimizer_state(zero, named_optimizer_state(zero))
    facts += _consistent(driver)
    after = [shard.main_values() for shard in natives(driver)]
    facts += [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    facts += [e["main"][0].dtype == torch.float32 for e in named_optimizer_state(zero).values()]
    driver.close()
    return facts


def _consistent(driver: Sharded) -> list[bool]:
    return [
        bool(is_rounded(shard.bucket.own_weights, shard.main_values()).all())
        for shard in natives(driver)
    ]


@pytest.mark.parametrize("preset", ["default", "compact", "fp32"])
def test_apex_1842_and_megatron_4222_weights_and_remainders_belong_together(preset: str) -> None:
    """Remainders of other weights, and remainders that a checkpoint had cast to float and back."""
    for facts in run_ranks(_remainders, 2, preset):
        assert facts
        assert all(facts)


def test_state_of_another_optimizer_is_not_taken() -> None:
    """Two optimizers over one module: each finds its own shards, whoever comes first."""
    for sizes in run_ranks(_apart, 2):
        assert sizes == [True, True]


def _apart(ctx: Context) -> list[bool]:
    model = toy.toy(BF16)
    first = [*model.inner.parameters(), *model.norm.parameters()]
    wanted = [optim.AdamW(first, lr=1e-2), optim.SGD(model.outer.parameters(), lr=0.1)]
    driver = Sharded(
        model, lambda _: wanted, toy.make_mesh(ctx.world_size), zero=PRESETS["default"]
    )
    names = [set(owned_ranges(zero)) for zero in driver.zeros]
    driver.close()
    return [
        names[0] <= {n for n, _ in model.named_parameters() if n.startswith(("inner", "norm"))},
        names[1] <= {n for n, _ in model.named_parameters() if n.startswith("outer")},
    ]
