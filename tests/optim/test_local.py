"""The optimizer's own ``state_dict`` on one rank."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from goose_strategy.errors import CheckpointError
from goose_strategy.optim.local import RANGE
from tests.data_parallel import toy
from tests.data_parallel.toy import Plain, adamw
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks
from tests.optim.narrow import BF16, PRESETS, assert_equal, assign, named, start, train, whole

ALL: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    **{name: (zero, BF16) for name, zero in PRESETS.items()},
    "torch in bf16": ({"preset": "fp32"}, BF16),
    "torch in fp64": ({}, torch.float64),
}


def _resumed(ctx: Context, zero: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any, bool]:
    driver = start(ctx, zero, dtype=dtype)
    train(driver, range(3))
    weights = {name: p.detach().clone() for name, p in driver.model.named_parameters()}
    state = driver.optimizer.state_dict()
    stored = io.BytesIO()
    torch.save(state, stored)
    train(driver, range(3, 6))
    unbroken, trained = named(driver), driver.finish().parameters
    other = start(ctx, zero, dtype=dtype)
    train(other, range(1))
    with torch.no_grad():
        for name, param in other.model.named_parameters():
            param.copy_(weights[name])
    stored.seek(0)
    other.optimizer.load_state_dict(torch.load(stored, weights_only=True))
    train(other, range(3, 6))
    again, resumed = named(other), other.finish().parameters
    return unbroken, again, all(torch.equal(resumed[n], p) for n, p in trained.items())


@pytest.mark.parametrize("case", ALL)
def test_a_run_resumes_with_the_same_bits(case: str) -> None:
    ranks = run_ranks(_resumed, 2, *ALL[case])
    assert_equal(whole([again for _, again, _ in ranks]), whole([first for first, _, _ in ranks]))
    assert all(equal for _, _, equal in ranks)


def _entries(ctx: Context, zero: dict[str, Any]) -> tuple[dict, list[tuple[int, ...]], int]:
    driver = start(ctx, zero)
    before = driver.optimizer.state_dict()
    train(driver, range(2))
    state = driver.optimizer.state_dict()
    shapes = [tuple(p.shape) for group in driver.optimizer.param_groups for p in group["params"]]
    driver.close()
    return state["state"], shapes, len(before["state"])


@pytest.mark.parametrize("case", ["default", "compact"])
def test_entries_cover_every_element_once_in_fp32(case: str) -> None:
    ranks = run_ranks(_entries, 4, PRESETS[case])
    covered: dict[int, int] = {}
    for state, _, _ in ranks:
        for index, entries in state.items():
            first, last = entries[RANGE]
            assert {"main", "exp_avg", "exp_avg_sq", "step"} <= entries.keys()
            for key in ("main", "exp_avg", "exp_avg_sq"):
                assert entries[key].dtype == torch.float32
                assert entries[key].shape == (last - first,)
            assert entries["step"] == 2
            covered[index] = covered.get(index, 0) + last - first
    assert covered == {i: torch.Size(shape).numel() for i, shape in enumerate(ranks[0][1])}


def _whole_state(ctx: Context, state: dict[str, Any], weights: dict[str, Tensor]) -> list[float]:
    driver = start(ctx, PRESETS["fp32"])
    with torch.no_grad():
        for name, param in driver.model.named_parameters():
            param.copy_(weights[name])
    driver.optimizer.load_state_dict(copy.deepcopy(state))
    gaps = []
    names = [n for g in driver.optimizer.param_groups for n in _names(driver, g)]
    for name, entries in named(driver).items():
        values, first, last = entries["exp_avg_sq"]
        expected = state["state"][names.index(name)]["exp_avg_sq"].view(-1)[first:last]
        gaps.append((values - expected).abs().max().item())
    driver.close()
    return gaps


def _names(driver: Plain, group: dict[str, Any]) -> list[str]:
    names = {id(p): n for n, p in driver.model.named_parameters()}
    return [names[id(p)] for p in group["params"]]


def test_states_of_one_process_keep_their_fp32() -> None:
    """torch casts what it loads to the weight's type: fp32 moments of bf16 weights become bf16."""
    driver = Plain(toy.toy(torch.float32), adamw)
    for step in range(3):
        for name, param in driver.model.named_parameters():
            param.grad = torch.full_like(param, 0.1 + step) * len(name)
        driver.optimizer.step()
    state = driver.optimizer.state_dict()
    parameters = driver.finish().parameters
    for gaps in run_ranks(_whole_state, 2, state, parameters):
        assert gaps
        assert max(gaps) == 0.0


def _wrong(ctx: Context, how: str) -> None:
    driver = start(ctx, PRESETS["default"])
    train(driver, range(1))
    state = driver.optimizer.state_dict()
    index = max(state["state"])
    if how == "elsewhere":
        first, last = state["state"][index][RANGE]
        state["state"][index][RANGE] = [first + 64, last + 64]
    elif how == "shape":
        state["state"][index] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3, 3)}
    else:
        state["param_groups"][0]["params"].pop()
    before = named(driver)
    try:
        driver.optimizer.load_state_dict(state)
    except CheckpointError:
        assert_equal(whole([named(driver)]), whole([before]))
        raise


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("elsewhere", "but this rank steps"),
        ("shape", r"has shape=\(3, 3\)"),
        ("fewer", "on this rank; load checkpoints of the whole model through the strategy"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changed(how: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message) as caught:
        run_ranks(_wrong, 1, how)
    assert caught.value.kind == CheckpointError.__name__


def _frozen(ctx: Context) -> set[int]:
    """The states of parameters that are frozen wait until they are thawed."""
    model = toy.toy(torch.float32)
    model.outer.requires_grad_(False)
    other = toy.Sharded(
        model, lambda m: [torch.optim.AdamW(m.parameters())], toy.make_mesh(1), zero=PRESETS["fp32"]
    )
    full = {
        index: {
            "step": torch.tensor(7.0),
            "exp_avg": torch.ones_like(p),
            "exp_avg_sq": torch.ones_like(p),
        }
        for index, p in enumerate(model.parameters())
    }
    groups = other.optimizer.state_dict()["param_groups"]
    other.optimizer.load_state_dict({"state": full, "param_groups": groups})
    model.outer.requires_grad_(True)
    assign(other, 0)
    other.optimizer.step()
    found = {int(entries["step"]) for entries in named(other).values()}
    assert named(other).keys() == dict(model.named_parameters()).keys()
    other.close()
    return found


def test_states_of_frozen_parameters_are_kept() -> None:
    assert run_ranks(_frozen, 1) == [{8}]
