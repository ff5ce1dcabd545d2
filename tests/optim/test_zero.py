"""The sharded step: any supported optimizer equals itself in one process with the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from goose_strategy.errors import ConfigError
from goose_strategy.optim.zero import ZeroShards
from tests.data_parallel import toy
from tests.data_parallel.test_reducer import ordinary, reference, run_sharded
from tests.data_parallel.toy import (
    STEPS,
    Plain,
    Sharded,
    Trace,
    adamw,
    assert_same,
    batch,
    decay_groups,
)
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks


def one(kind: type[Optimizer], options: dict[str, Any], model: nn.Module) -> list[Optimizer]:
    return [kind([p for p in model.parameters() if p.requires_grad], **options)]


def grouped(kind: type[Optimizer], options: dict[str, Any], model: nn.Module) -> list[Optimizer]:
    return [kind(decay_groups(model), **options)]


KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (optim.AdamW, {"lr": 1e-2}),
    (optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    (optim.AdamW, {"lr": 1e-2, "foreach": True}),
    (optim.AdamW, {"lr": 1e-2, "foreach": False}),
    (optim.AdamW, {"lr": 1e-2, "fused": True}),
    (optim.AdamW, {"lr": 1e-2, "fused": False}),
    (optim.AdamW, {"lr": 1e-2, "capturable": False, "differentiable": False}),
    (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    (optim.Adam, {"lr": 1e-2, "amsgrad": True, "fused": True}),
    (optim.SGD, {"lr": 1e-1}),
    (optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
    (optim.SGD, {"lr": 1e-1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    (optim.SGD, {"lr": 1e-1, "momentum": 0.9, "foreach": True}),
    (optim.SGD, {"lr": 1e-1, "momentum": 0.9, "fused": True}),
    (optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    (optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    (optim.NAdam, {"lr": 1e-2}),
    (optim.RAdam, {"lr": 1e-2}),
    (optim.Adamax, {"lr": 1e-2}),
    (optim.Adadelta, {"lr": 1.0}),
    (optim.ASGD, {"lr": 1e-2}),
    (optim.Rprop, {"lr": 1e-3}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda v: getattr(v, "__name__", None))
def test_equals_one_process_in_fp64(kind: type[Optimizer], options: dict[str, Any]) -> None:
    wanted = partial(one if kind is optim.Rprop else grouped, kind, options)
    expected = reference(ordinary, wanted)
    for trace in run_ranks(run_sharded, 4, ordinary, wanted, {}):
        assert_same(trace, expected, rel=1e-10)


@pytest.mark.parametrize(("kind", "options"), [KINDS[0], KINDS[10]], ids=["AdamW", "SGD"])
def test_equals_one_process_in_fp32(kind: type[Optimizer], options: dict[str, Any]) -> None:
    wanted = partial(grouped, kind, options)
    expected = reference(ordinary, wanted, dtype=torch.float32)
    for trace in run_ranks(run_sharded, 2, ordinary, wanted, {"dtype": torch.float32}):
        assert_same(trace, expected, rel=1e-4)


# -- what users do around the step -----------------------------------------------------------------


def _scheduled(driver: Plain) -> None:
    """Schedulers made before the optimizer was attached, and after; both patch ``step``."""
    early: list[LRScheduler] = driver.early
    late = [
        optim.lr_scheduler.StepLR(driver.optimizer, 2, gamma=0.5),
        optim.lr_scheduler.CyclicLR(driver.optimizer, 1e-3, 1e-2, step_size_up=3),
    ]
    for step in range(STEPS):
        driver.backward(driver.forward(driver.rows(batch(step))).square().mean())
        driver.optimizer.step()
        driver.optimizer.zero_grad()
        for scheduler in early + late[: 1 + step % 2]:
            scheduler.step()
    rates = [torch.tensor(group["lr"]) for group in driver.optimizer.param_groups]
    driver.trace.gradients.append({str(i): rate for i, rate in enumerate(rates)})


def _with_early(model: nn.Module, kept: list[LRScheduler]) -> Sequence[Optimizer]:
    optimizers = adamw(model)
    kept.append(optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9))
    return optimizers


def _run_scheduled(ctx: Context) -> Trace:
    kept: list[LRScheduler] = []
    mesh = toy.make_mesh(ctx.world_size)
    driver = Sharded(toy.toy(), partial(_with_early, kept=kept), mesh)
    driver.early = kept
    _scheduled(driver)
    return driver.finish()


def test_schedulers_that_patch_step_before_and_after_are_heeded() -> None:
    kept: list[LRScheduler] = []
    driver = Plain(toy.toy(), partial(_with_early, kept=kept))
    driver.early = kept
    _scheduled(driver)
    expected = driver.finish()
    for trace in run_ranks(_run_scheduled, 2):
        assert_same(trace, expected, rel=1e-11)


def _closure(driver: Plain) -> None:
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            # Lightning's closure clears, runs the backward and clips: all on the model's params.
            driver.optimizer.zero_grad()
            assert driver.optimizer.param_groups[0]["params"][0] is driver.model.inner.weight
            loss = driver.forward(driver.rows(batch(step))).square().mean()
            driver.backward(loss)
            driver.clip(0.05)
            return loss

        returned = (
            driver.optimizer.step(closure) if step % 2 else driver.optimizer.step(closure=closure)
        )
        assert returned.ndim == 0


def test_a_closure_runs_before_the_swap() -> None:
    expected = reference(_closure)
    for trace in run_ranks(run_sharded, 2, _closure, adamw, {}):
        assert_same(trace, expected, rel=1e-11)


def two_optimizers(model: nn.Module) -> list[Optimizer]:
    first = [*model.inner.parameters(), *model.norm.parameters()]
    second = [*model.outer.parameters(), *model.branch.parameters()]
    return [optim.AdamW(first, lr=1e-2), optim.SGD(second, lr=1e-1, momentum=0.9)]


def _alternating(driver: Plain) -> None:
    """Two optimizers over disjoint parameters; ``gain`` is in neither."""
    for step in range(STEPS):
        driver.backward(driver.forward(driver.rows(batch(step))).square().mean())
        driver.record_gradients()
        index = step % 2
        driver.clip(0.03, index=index)
        driver.optimizers[index].step()
        driver.optimizers[index].zero_grad()
    assert driver.model.gain.grad is not None
    driver.clip(0.01, norm_type=float("inf"), index=1)
    driver.optimizers[1].step()


@pytest.mark.parametrize("told", [True, False])
def test_several_optimizers_and_parameters_in_none(told: bool) -> None:
    expected = reference(_alternating, two_optimizers)
    for trace in run_ranks(run_sharded, 2, _alternating, two_optimizers, {"told": told}):
        assert_same(trace, expected, rel=1e-11)
        assert torch.equal(trace.parameters["gain"], torch.tensor(1.5, dtype=torch.float64))


def inner_only(model: nn.Module) -> list[Optimizer]:
    model.outer.requires_grad_(False)
    return [optim.AdamW(model.inner.parameters(), lr=1e-2)]


def _grown(driver: Plain, *, when: str) -> None:
    """Groups are added later: parameters that were frozen, and some that were in no optimizer."""
    for step in range(STEPS):
        if step == 2 and when == "before forward":
            _grow(driver)
        driver.backward(driver.forward(driver.rows(batch(step))).square().mean(), sync=step != 3)
        if step == 2 and when == "before step":
            _grow(driver)
        driver.clip(0.05)
        driver.record_gradients()
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def _grow(driver: Plain) -> None:
    driver.model.outer.requires_grad_(True)
    added = [*driver.model.outer.parameters(), *driver.model.norm.parameters()]
    driver.optimizer.add_param_group({"params": added, "lr": 3e-3, "weight_decay": 0.3})


@pytest.mark.parametrize("when", ["before forward", "before step"])
@pytest.mark.parametrize("told", [True, False])
def test_groups_may_be_added_later(told: bool, when: str) -> None:
    scenario = partial(_grown, when=when)
    expected = reference(scenario, inner_only)
    options = {"told": told, "bucket_numel": 4000}
    for trace in run_ranks(run_sharded, 2, scenario, inner_only, options):
        assert_same(trace, expected, rel=1e-11)


def all_with_frozen(model: nn.Module, kind: type[Optimizer] = optim.AdamW) -> list[Optimizer]:
    optimizers = [kind(model.parameters(), lr=1e-2)]
    model.outer.requires_grad_(False)
    return optimizers


def _thawed(driver: Plain) -> None:
    """Frozen parameters are in the optimizer from the start, and are thawed on the way."""
    for step in range(STEPS):
        if step == 2:
            driver.model.outer.requires_grad_(True)
        driver.backward(driver.forward(driver.rows(batch(step))).square().mean())
        driver.clip(0.05)
        driver.record_gradients()
        driver.optimizer.step()
        driver.optimizer.zero_grad()


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad])
def test_parameters_may_be_thawed_later(kind: type[Optimizer]) -> None:
    """Adagrad makes its state in the constructor, also for what is frozen then."""
    wanted = partial(all_with_frozen, kind=kind)
    expected = reference(_thawed, wanted)
    for trace in run_ranks(run_sharded, 2, _thawed, wanted, {}):
        assert_same(trace, expected, rel=1e-11)


def _replaced(driver: Plain) -> None:
    """Some steps begin with parameters that were given another memory."""
    params = list(driver.model.parameters())
    for step in range(STEPS):
        if step == 1:
            halved = nn.utils.parameters_to_vector(params).detach() * 0.5
            nn.utils.vector_to_parameters(halved, params)
        driver.backward(driver.forward(driver.rows(batch(step))).square().mean())
        if step == 3:
            driver.model.gain.data = driver.model.gain.data * 2
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def test_parameters_whose_memory_was_replaced_are_stepped() -> None:
    expected = reference(_replaced)
    for trace in run_ranks(run_sharded, 2, _replaced, adamw, {"bucket_numel": 4000}):
        assert_same(trace, expected, rel=1e-11)


# -- what is visible, and what is refused ----------------------------------------------------------


def _visible(ctx: Context) -> None:
    driver = Sharded(toy.toy(branches=1), adamw, toy.make_mesh(ctx.world_size))
    model, optimizer = driver.model, driver.optimizer
    params = [list(group["params"]) for group in optimizer.param_groups]
    lists = [group["params"] for group in optimizer.param_groups]
    seen: list[str] = []

    def during(*_: Any) -> None:
        inside = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append("flat" if all(p.dim() == 1 and p.grad is not None for p in inside) else "?")
        seen.append(str(len(inside) <= len(driver.zeros[0].segments())))

    optimizer.register_step_pre_hook(during)
    driver.backward(driver.forward(driver.rows(batch(0))).square().mean())
    version = model.inner.weight._version
    optimizer.step()
    assert seen == ["flat", "True"]
    assert [group["params"] for group in optimizer.param_groups] == params
    assert all(g["params"] is kept for g, kept in zip(optimizer.param_groups, lists, strict=True))
    assert all(group["fused"] is None for group in optimizer.param_groups)
    assert not optimizer.state
    assert model.inner.weight.grad is not None, "torch keeps gradients after a step, too"
    assert model.inner.weight._version > version
    driver.close()


def test_param_groups_show_the_models_parameters_outside_of_the_step() -> None:
    run_ranks(_visible, 2)


def _stale_graph(ctx: Context) -> str:
    driver = Sharded(toy.toy(branches=1), adamw, toy.make_mesh(ctx.world_size))
    loss = driver.forward(driver.rows(batch(0))).square().mean()
    driver.backward(loss, retain_graph=True)
    driver.optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    finally:
        driver.close()
    return "not noticed"


def test_a_backward_through_weights_that_were_stepped_is_noticed() -> None:
    assert "modified by an inplace operation" in run_ranks(_stale_graph, 1)[0]


def _failing_step(ctx: Context) -> bool:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    group = driver.optimizer.param_groups[0]
    driver.backward(driver.forward(driver.rows(batch(0))).square().mean())
    group["lr"] = "fast"
    with pytest.raises(TypeError):
        driver.optimizer.step()
    group["lr"] = 1e-2
    driver.optimizer.step()
    shown = group["params"][0] is driver.model.inner.weight
    driver.close()
    return shown


def test_a_step_that_raised_is_cleaned_up_by_the_next() -> None:
    assert run_ranks(_failing_step, 1) == [True]


def _misuse(ctx: Context, how: str) -> None:
    model = toy.toy()
    driver = Sharded(model, adamw, toy.make_mesh(ctx.world_size))
    if how == "foreign":
        foreign = nn.Parameter(torch.zeros(3))
        ZeroShards(driver.reducer, optim.SGD([foreign], lr=0.1))
    elif how == "taken":
        ZeroShards(driver.reducer, optim.SGD([model.gain, model.inner.bias], lr=0.1))
    else:
        ZeroShards(driver.reducer, optim.LBFGS([model.gain]))


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("foreign", ConfigError, r"shape=\(3,\) in group 0 that is not the module's"),
        ("taken", ConfigError, "moved to another optimizer group"),
        ("unsupported", ConfigError, "optimizer=LBFGS cannot be sharded"),
    ],
)
def test_misuse_is_refused(how: str, error: type[Exception], message: str) -> None:
    with pytest.raises(RankFailure, match=f"(?i){message}") as caught:
        run_ranks(_misuse, 1, how)
    assert caught.value.kind == error.__name__


def _planted(driver: Plain, *, fault: str) -> None:
    if isinstance(driver, Sharded):
        for zero in driver.zeros:
            for shard in zero.shards:
                if fault == "weights not gathered":
                    shard.bucket.gather_weights = lambda: _Nothing()
                elif fault == "unused stepped":
                    shard.active = lambda states, shard=shard: shard.segments
    ordinary(driver)


class _Nothing:
    def wait(self) -> None:
        pass


@pytest.mark.parametrize("fault", ["weights not gathered", "unused stepped"])
def test_a_planted_fault_is_found(fault: str) -> None:
    expected = reference(ordinary)
    traces = run_ranks(run_sharded, 2, partial(_planted, fault=fault), adamw, {})
    assert any(toy.largest_gap(t.parameters, expected.parameters) > 1e-6 for t in traces)
