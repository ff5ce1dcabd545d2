"""Optimizer state by parameter name: out, in, and across layouts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from goose_strategy.errors import CheckpointError
from goose_strategy.optim.state import (
    MAIN,
    NamedState,
    load_named_optimizer_state,
    named_optimizer_state,
    owned_ranges,
)
from tests.data_parallel import toy
from tests.data_parallel.toy import Plain, Sharded, adamw, batch
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks

Whole = dict[str, dict[str, Any]]


def train(driver: Plain, steps: range, dtype: torch.dtype = torch.float64) -> None:
    """Every second step uses the other branch, so that step counts differ."""
    for step in steps:
        x = driver.rows(batch(step, dtype))
        driver.backward(driver.forward(x, branch=int(step % 3 == 2)).square().mean())
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def _copied(named: NamedState) -> NamedState:
    def cloned(value: Any) -> Any:
        if isinstance(value, tuple):
            return (value[0].clone(), *value[1:])
        return value.clone() if isinstance(value, Tensor) else value

    return {name: {k: cloned(v) for k, v in state.items()} for name, state in named.items()}


def _saved(ctx: Context, wanted: Any, dtype: torch.dtype) -> tuple[NamedState, dict[str, Tensor]]:
    driver = Sharded(toy.toy(dtype), wanted, toy.make_mesh(ctx.world_size))
    train(driver, range(3), dtype)
    named = _copied(named_optimizer_state(driver.zeros[0]))
    assert named.keys() <= owned_ranges(driver.zeros[0]).keys()
    return named, driver.finish().parameters


def _whole(parts: list[NamedState], shapes: dict[str, torch.Size]) -> Whole:
    """Put the ranges of all ranks together; every element must be there exactly once."""
    whole: Whole = {}
    seen: dict[tuple[str, str], int] = {}
    for part in parts:
        for name, state in part.items():
            for key, value in state.items():
                if not isinstance(value, tuple):
                    known = whole.setdefault(name, {}).setdefault(key, value)
                    assert known == value
                    continue
                values, start, stop = value
                flat = torch.full((shapes[name].numel(),), torch.nan, dtype=values.dtype)
                flat = whole.setdefault(name, {}).setdefault(key, flat)
                assert flat[start:stop].isnan().all(), "an element that two ranks hold"
                flat[start:stop] = values
                seen[name, key] = seen.get((name, key), 0) + stop - start
    for (name, key), count in seen.items():
        assert count == shapes[name].numel()
        assert not whole[name][key].isnan().any()
    return whole


def _sliced(whole: Whole, ranges: dict[str, tuple[int, int]]) -> NamedState:
    named: NamedState = {}
    for name, (start, stop) in ranges.items():
        for key, value in whole.get(name, {}).items():
            flat = isinstance(value, Tensor) and value.dim() > 0
            cut = (value[start:stop], start, stop) if flat else value
            named.setdefault(name, {})[key] = cut
    return named


def _resumed(
    ctx: Context, wanted: Any, dtype: torch.dtype, whole: Whole, parameters: dict[str, Tensor]
) -> tuple[dict[str, Tensor], NamedState]:
    model = toy.toy(dtype)
    model.load_state_dict(parameters)
    driver = Sharded(model, wanted, toy.make_mesh(ctx.world_size), bucket_numel=2500)
    zero = driver.zeros[0]
    load_named_optimizer_state(zero, _sliced(whole, owned_ranges(zero)))
    again = _copied(named_optimizer_state(zero))
    train(driver, range(3, 6), dtype)
    return driver.finish().parameters, again


def _unbroken(ctx: Context, wanted: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    driver = Sharded(toy.toy(dtype), wanted, toy.make_mesh(ctx.world_size))
    train(driver, range(6), dtype)
    return driver.finish().parameters


def _make(kind: type[Optimizer], options: dict[str, Any], model: nn.Module) -> list[Optimizer]:
    return [kind(toy.decay_groups(model), **options)]


KINDS = [
    partial(_make, optim.AdamW, {"lr": 1e-2}),
    partial(_make, optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
    partial(_make, optim.SGD, {"lr": 1e-1}),
    partial(_make, optim.NAdam, {"lr": 1e-2}),
]


@pytest.mark.parametrize("wanted", KINDS, ids=["AdamW", "momentum", "SGD", "NAdam"])
def test_a_resumed_run_equals_an_unbroken_one(wanted: Callable[[nn.Module], list]) -> None:
    dtype = torch.float32
    shapes = {name: p.shape for name, p in toy.toy().named_parameters()}
    saved = run_ranks(_saved, 2, wanted, dtype)
    whole = _whole([named for named, _ in saved], shapes)
    expected = run_ranks(_unbroken, 2, wanted, dtype)[0]
    for parameters, again in run_ranks(_resumed, 2, wanted, dtype, whole, saved[0][1]):
        assert _whole_equal(again, whole)
        # Bitwise, although the buckets, and with them the slices, are others.
        gaps = {n: (parameters[n] - expected[n]).abs().max().item() for n in expected}
        assert max(gaps.values()) <= (0.0 if "SGD" in str(wanted) else 1e-8), gaps


def _whole_equal(named: NamedState, whole: Whole) -> bool:
    for name, state in named.items():
        for key, value in state.items():
            if isinstance(value, tuple):
                values, start, stop = value
                assert torch.equal(values, whole[name][key][start:stop]), (name, key)
            else:
                assert value == whole[name][key], (name, key)
    return True


@pytest.mark.parametrize("world_size", [1, 4])
def test_another_number_of_ranks_goes_on_with_the_same_state(world_size: int) -> None:
    dtype = torch.float64
    shapes = {name: p.shape for name, p in toy.toy().named_parameters()}
    saved = run_ranks(_saved, 2, adamw, dtype)
    whole = _whole([named for named, _ in saved], shapes)
    driver = Plain(toy.toy(dtype), adamw)
    train(driver, range(6), dtype)
    for parameters, _ in run_ranks(_resumed, world_size, adamw, dtype, whole, saved[0][1]):
        assert toy.largest_gap(parameters, driver.finish().parameters) < 1e-11


def test_states_are_those_of_one_process() -> None:
    shapes = {name: p.shape for name, p in toy.toy().named_parameters()}
    whole = _whole([n for n, _ in run_ranks(_saved, 4, adamw, torch.float64)], shapes)
    driver = Plain(toy.toy(), adamw)
    train(driver, range(3))
    states = {n: driver.optimizer.state[p] for n, p in driver.model.named_parameters()}
    assert whole.keys() == {name for name, state in states.items() if state}
    steps = {name: state["step"].item() for name, state in whole.items()}
    assert set(steps.values()) == {1.0, 2.0, 3.0}
    for name, state in whole.items():
        assert state["step"] == states[name]["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            expected = states[name][key].flatten()
            assert (state[key] - expected).norm() <= 1e-11 * expected.norm()


def _plain_state(
    ctx: Context, state: dict[str, Any], parameters: dict[str, Tensor], before: bool
) -> dict[str, Tensor]:
    """torch's own ``load_state_dict``, into whole parameters, before attaching or after."""
    model = toy.toy()
    model.load_state_dict(parameters)

    def wanted(model: nn.Module) -> list[Optimizer]:
        optimizers = adamw(model)
        if before:
            optimizers[0].load_state_dict(state)
        return optimizers

    driver = Sharded(model, wanted, toy.make_mesh(ctx.world_size))
    if not before:
        driver.optimizer.load_state_dict(state)
    train(driver, range(3, 6))
    return driver.finish().parameters


@pytest.mark.parametrize("before", [True, False])
def test_a_state_dict_of_one_process_is_sliced(before: bool) -> None:
    driver = Plain(toy.toy(), adamw)
    train(driver, range(3))
    state = copy.deepcopy(driver.optimizer.state_dict())
    parameters = driver.finish().parameters
    train(driver, range(3, 6))
    expected = driver.finish().parameters
    for mine in run_ranks(_plain_state, 2, state, parameters, before):
        assert toy.largest_gap(mine, expected) < 1e-11


def _wrong(ctx: Context, how: str) -> None:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    train(driver, range(1))
    zero = driver.zeros[0]
    state = named_optimizer_state(zero)
    entries = next(iter(state.values()))
    values, start, stop = entries["exp_avg"]
    if how == "shifted":
        entries["exp_avg"] = (values, start + 1, stop + 1)
    elif how == "short":
        entries["exp_avg"] = (values[1:], start, stop)
    elif how == "unknown":
        state["nobody"] = entries
    else:
        driver.optimizer.state[driver.model.inner.weight] = {"exp_avg": torch.zeros(3, 3)}
        driver.optimizer.step()
    load_named_optimizer_state(zero, state)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("shifted", "but this rank steps"),
        ("short", "but this rank steps"),
        ("unknown", "'nobody': this rank steps no part of it"),
        ("shape", r"has shape=\(3, 3\), but the parameter on this rank has \(150, 12\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(how: str, message: str) -> None:
    with pytest.raises(RankFailure, match=message) as caught:
        run_ranks(_wrong, 1, how)
    assert caught.value.kind == CheckpointError.__name__


def _main(ctx: Context) -> tuple[bool, bool]:
    driver = Sharded(
        toy.toy(torch.bfloat16), adamw, toy.make_mesh(ctx.world_size), zero={"preset": "fp32"}
    )
    train(driver, range(2), torch.bfloat16)
    zero = driver.zeros[0]
    state = _copied(named_optimizer_state(zero))
    wide = all(entries[MAIN][0].dtype == torch.float32 for entries in state.values())
    kept = [shard.main.clone() for shard in zero.shards]
    for shard in zero.shards:
        shard.main.zero_()
    load_named_optimizer_state(zero, state)
    back = all(
        torch.equal(shard.main[p.start : p.stop], old[p.start : p.stop])
        for shard, old in zip(zero.shards, kept, strict=True)
        for p in shard.pieces
    )
    driver.close()
    return wide, back


def test_main_weights_are_part_of_the_state() -> None:
    assert run_ranks(_main, 2) == [(True, True)] * 2
