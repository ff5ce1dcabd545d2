"""A slice stepped by cuda_ops: exact where it is promised, and the same bits in every layout."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from goose_strategy.optim.lion import Lion
from tests.data_parallel import toy
from tests.data_parallel.test_reducer import ordinary, reference, run_sharded
from tests.data_parallel.toy import Sharded, Trace, assert_same, decay_groups
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.optim.narrow import (
    BF16,
    PRESETS,
    Whole,
    assert_equal,
    assign,
    named,
    natives,
    start,
    train,
    whole,
)

STEPS = 6


def make(kind: type[optim.Optimizer], options: dict[str, Any], model: nn.Module) -> list[Any]:
    return [kind(decay_groups(model), **options)]


KINDS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.AdamW, {"lr": 1e-2}),
    (optim.AdamW, {"lr": 1e-2, "maximize": True, "betas": (0.8, 0.95), "eps": 1e-6}),
    (optim.AdamW, {"lr": 1e-2, "foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(1e-2), "fused": True}),
    (optim.Adam, {"lr": 1e-2}),
    (optim.Adam, {"lr": 1e-2, "decoupled_weight_decay": True}),
    (optim.SGD, {"lr": 1e-1}),
    (optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"lr": 1e-1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (Lion, {"lr": 1e-3}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda v: getattr(v, "__name__", None))
def test_fp32_states_equal_one_process(kind: type[optim.Optimizer], options: dict) -> None:
    wanted = partial(make, kind, options)
    expected = reference(ordinary, wanted, dtype=torch.float32)
    zero = {"preset": "fp32", "skip_nonfinite": True}
    for trace in run_ranks(
        run_sharded, 2, ordinary, wanted, {"dtype": torch.float32, "zero": zero}
    ):
        # As far apart as torch's own kernels, where gradients are summed in another order.
        assert_same(trace, expected, rel=1e-4 if kind is Lion else 1e-5)


def _same_gradients(ctx: Context, native: bool) -> dict[str, Tensor]:
    zero = {"preset": "fp32", "skip_nonfinite": native}
    driver = start(ctx, zero, dtype=torch.float32)
    train(driver, range(50))
    return driver.finish().parameters


def test_fifty_steps_of_fp32_stay_within_rounding_of_torch() -> None:
    # Measured: 1.1e-7 of a parameter's norm, as far as torch's own kernels are from one another.
    ours, torchs = run_ranks(_same_gradients, 2, True)[0], run_ranks(_same_gradients, 2, False)[0]
    for name, value in torchs.items():
        assert (ours[name] - value).norm() <= 2e-7 * value.norm(), name


def _split(ctx: Context, main: str) -> tuple[Whole, dict[str, Tensor]]:
    zero = {"main": main, "exp_avg": "fp32", "exp_avg_sq": "fp32", "skip_nonfinite": True}
    driver = start(ctx, zero)
    train(driver, range(STEPS))
    return whole([named(driver)]), driver.finish().parameters


def test_a_weight_and_its_remainder_are_exactly_fp32() -> None:
    (wide, rounded), (split, weights) = (run_ranks(_split, 1, m)[0] for m in ("fp32", "bf16+16"))
    assert_equal(split, wide)
    for name, weight in weights.items():
        main = wide[name]["main"].view(weight.shape)
        assert torch.equal(rounded[name], main.to(BF16))
        # To nearest, where ties go away from zero: nothing else would be invertible.
        ties = (main.view(torch.int32) & 0xFFFF) == 0x8000
        assert torch.equal(weight[~ties], rounded[name][~ties])
        assert ((main - weight.float()).abs() <= (main - rounded[name].float()).abs()).all()


def _layout(ctx: Context, zero: dict, bucket_numel: int) -> tuple[Any, Trace, dict[str, Tensor]]:
    driver = start(ctx, zero, bucket_numel=bucket_numel)
    train(driver, range(STEPS))
    state = named(driver)
    trace = driver.finish()
    return state, trace, trace.parameters


@pytest.mark.parametrize("preset", PRESETS)
def test_no_number_of_replicas_and_no_size_of_buckets_changes_a_bit(preset: str) -> None:
    zero = PRESETS[preset]
    alone = run_ranks(_layout, 1, zero, 10**6)
    expected = whole([alone[0][0]])
    for world_size, bucket_numel in ((2, 6000), (4, 6000), (4, 10**6), (8, 100)):
        ranks = run_ranks(_layout, world_size, zero, bucket_numel)
        assert_equal(whole([state for state, _, _ in ranks]), expected)
        for _, trace, weights in ranks:
            assert trace.norms == alone[0][1].norms
            assert all(torch.equal(weights[n], w) for n, w in alone[0][2].items())


def test_stochastic_presets_differ_from_one_another_and_train_alike() -> None:
    wide = run_ranks(_layout, 1, PRESETS["fp32"], 6000)[0]
    for preset in ("default", "compact", "alone", "mixed"):
        _, trace, weights = run_ranks(_layout, 1, PRESETS[preset], 6000)[0]
        assert trace.norms == wide[1].norms
        for name, exact in wide[2].items():
            moved = (exact.float() - toy.toy(BF16).get_parameter(name).float()).norm()
            gap = (weights[name].float() - exact.float()).norm()
            assert gap <= 0.25 * moved + 2**-7 * exact.float().norm(), (preset, name)
        assert any(not torch.equal(weights[name], w) for name, w in wide[2].items()), preset


def _sizes(ctx: Context, zero: dict, dtype: torch.dtype) -> tuple[int, int]:
    driver = start(ctx, zero, dtype=dtype, bucket_numel=10**6)
    train(driver, range(2))
    state, elements = 0, 0
    for shard in natives(driver):
        kept = {
            name: value
            for name, value in vars(shard.flat).items()
            if isinstance(value, Tensor)
            and name != "weight"
            and value is not shard.bucket.own_weights
        }
        state += sum(value.numel() * value.element_size() for value in kept.values())
        elements += shard.flat.numel
    driver.close()
    return state, elements


@pytest.mark.parametrize(
    ("zero", "dtype", "wanted"),
    [
        (PRESETS["fp32"], BF16, 12.0),
        (PRESETS["fp32"], torch.float32, 8.0),
        (PRESETS["default"], BF16, 6.0),
        (PRESETS["compact"], BF16, 3.0 + 6 / 64),
        (PRESETS["alone"], BF16, 4.0),
        ({"preset": "compact", "main": "fp32"}, torch.float32, 2.0 + 6 / 64),
    ],
    ids=str,
)
def test_the_state_has_as_many_bytes_as_it_says(zero: dict, dtype: Any, wanted: float) -> None:
    for state, elements in run_ranks(_sizes, 2, zero, dtype):
        assert state / elements == wanted


def _holes(ctx: Context, native: bool) -> tuple[Trace, list[float], int]:
    """Some parameters have no gradient in some steps: they do not age, and are left alone."""
    zero = {"preset": "fp32", "skip_nonfinite": native}
    driver = start(ctx, zero, dtype=torch.float32)
    for step in range(8):
        without = [(), ("outer",), ("outer", "branch.1"), ("branch",)][step % 4]
        assign(driver, step, without=without)
        driver.optimizer.step()
        driver.optimizer.zero_grad()
    state = named(driver)
    steps = [float(entries["step"]) for _, entries in sorted(state.items())]
    rows = len(driver.zeros[0].native.clock.groups) if native else 0
    return driver.finish(), steps, rows


def test_parameters_without_a_gradient_neither_age_nor_move() -> None:
    seen: set[float] = set()
    for (ours, steps, rows), (torchs, expected, _) in zip(
        run_ranks(_holes, 2, True), run_ranks(_holes, 2, False), strict=True
    ):
        assert steps == expected
        seen |= set(steps)
        assert rows <= 14, "tables do not pile up"
        for name, value in torchs.parameters.items():
            assert torch.allclose(ours.parameters[name], value, rtol=1e-5, atol=1e-7), name
    assert seen == {4.0, 6.0, 8.0}


def _written(ctx: Context, zero: dict) -> list[object]:
    driver = start(ctx, zero, branches=1)
    model = driver.model

    def step(index: int) -> int:
        assign(driver, index)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            driver.optimizer.step()
        driver.optimizer.zero_grad()
        return len([w for w in caught if "main weights were rebuilt" in str(w.message)])

    facts: list[object] = [step(0), step(1)]
    away = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            # An average swapped in past autograd's eyes, and swapped out again: nothing is lost.
            param.data.mul_(2)
        for name, param in model.named_parameters():
            param.data.copy_(away[name])
    facts.append(step(2))
    with torch.no_grad():
        model.inner.weight.data[3, 5] += 1.0
    facts.append(step(3))
    facts.append(step(4))
    with torch.no_grad():
        for param in model.parameters():
            param.data.zero_()
    driver.zeros[0].take_over_weights()
    facts.append(all((s.main_values() == 0).all().item() for s in natives(driver)))
    facts.append(step(5))
    driver.close()
    return facts


@pytest.mark.parametrize("preset", ["default", "compact", "fp32", "alone"])
def test_weights_written_from_outside_are_taken_over(preset: str) -> None:
    ranks = run_ranks(_written, 2, PRESETS[preset])
    # A weight that is its own main weight has nothing to be rebuilt.
    hears = preset != "alone"
    one_hears = [rank for rank in ranks if rank[3] == int(hears)]
    assert one_hears
    for facts in ranks:
        assert facts[:3] == [0, 0, 0]
        assert facts[4:] == [0, True, 0]
    if hears:
        assert sum(int(facts[3]) for facts in ranks) == 1, "only the rank that steps the element"


def _two(ctx: Context) -> tuple[Trace, Trace]:
    """Two optimizers, one of them Lion, and a group that comes later."""

    def wanted(model: nn.Module) -> list[optim.Optimizer]:
        first = optim.AdamW(model.inner.parameters(), lr=1e-2)
        return [first, Lion([*model.outer.parameters(), *model.branch.parameters()], lr=1e-3)]

    traces = []
    for zero in ({"preset": "fp32", "skip_nonfinite": True}, {"preset": "fp32"}):
        driver = start(ctx, zero, dtype=torch.float32, wanted=wanted)
        for step in range(5):
            if step == 2:
                group = {"params": list(driver.model.norm.parameters()), "lr": 3e-3}
                driver.optimizers[0].add_param_group(group)
            assign(driver, step)
            for optimizer in driver.optimizers:
                optimizer.step()
            for optimizer in driver.optimizers:
                optimizer.zero_grad()
            driver.model.gain.grad = None
        traces.append(driver.finish())
    return traces[0], traces[1]


def test_several_optimizers_and_later_groups() -> None:
    for native, torchs in run_ranks(_two, 2):
        for name, value in torchs.parameters.items():
            assert torch.allclose(native.parameters[name], value, rtol=1e-5, atol=1e-7), name


def _follows(ctx: Context, zero: dict[str, Any]) -> Tensor:
    """Second moments after the gradients became ten times smaller."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False).to(BF16)
    wanted = lambda m: [optim.AdamW(m.parameters(), lr=0.0, betas=(0.9, 0.999))]  # noqa: E731
    driver = Sharded(model, wanted, toy.make_mesh(1), zero=zero)
    generator = torch.Generator().manual_seed(1)
    spread = torch.exp(torch.randn(64, 64, generator=generator)) * 1e-3
    for step in range(3000):
        size = spread if step < 300 else spread / 10
        model.weight.grad = torch.randn(64, 64, generator=generator) * size
        driver.optimizer.step()
    (entries,) = named(driver).values()
    driver.close()
    return entries["exp_avg_sq"][0]


@pytest.mark.timeout(180)
def test_second_moments_follow_fp32_when_gradients_fall() -> None:
    wide = run_ranks(_follows, 1, PRESETS["fp32"])[0].sqrt()
    for preset in ("default", "compact"):
        ratio = run_ranks(_follows, 1, PRESETS[preset])[0].sqrt() / wide
        assert 0.9 < ratio.median() < 1.1, (preset, ratio.median())
        assert (ratio > 0).all()
    # What a cast to bf16 makes of it: a decay of 0.001 is less than half a step of bf16.
    generator = torch.Generator().manual_seed(1)
    spread = torch.exp(torch.randn(64, 64, generator=generator)) * 1e-3
    plain = torch.zeros(64, 64, dtype=BF16)
    for step in range(3000):
        grad = torch.randn(64, 64, generator=generator) * (spread if step < 300 else spread / 10)
        plain = (plain.float() * 0.999 + 0.001 * grad.square()).to(BF16)
    assert (plain.float().sqrt().view(-1) / wide).median() > 2.5


def _nan(ctx: Context, zero: dict[str, Any]) -> bool:
    driver = start(ctx, zero, branches=1)
    for shard in natives(driver):
        # The bits of CUDA's NaN, which become -0.0 where a carry runs through them.
        main = torch.full((shard.flat.numel,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
        shard.set_main(main)
    assign(driver, 0)
    driver.optimizer.step()
    found = all(param.isnan().all().item() for param in driver.model.parameters())
    driver.close()
    return found


@pytest.mark.parametrize("preset", ["default", "compact", "alone", "fp32"])
def test_a_nan_stays_one(preset: str) -> None:
    assert run_ranks(_nan, 1, PRESETS[preset]) == [True]
