"""Gradients that are summed over tp or between the stages of a tied weight before dp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.mesh.shard import ShardSpec
from tests.data_parallel import toy
from tests.data_parallel.toy import STEPS, Plain, Sharded, Trace, adamw, assert_same, batch
from tests.harness.worker import Context
from tests.harness.world import run_ranks

ROWS = 300


def _init(*shape: int, seed: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64) / 10 + 0.5)


class Layer(nn.Module):
    """``cut`` is split over tp; ``scale`` feeds it, so each tp rank sees part of its gradient."""

    def __init__(self, part: slice = slice(None)) -> None:
        super().__init__()
        self.scale = _init(toy.WIDTH, seed=1)
        self.cut = nn.Parameter(_init(ROWS, toy.WIDTH, seed=2).detach()[part].clone())
        self.copy = _init(toy.WIDTH, 200, seed=3)

    def forward(self, x: Tensor) -> Tensor:
        split = (x * self.scale) @ self.cut.t()
        return split.square().sum(1).mean() / 100 + (x @ self.copy).square().sum(1).mean() / 100


def _layer_specs(model: nn.Module, mesh: ParallelMesh) -> dict[str, ShardSpec]:
    params = dict(model.named_parameters())
    specs = {name: ShardSpec.replicated(name, p) for name, p in params.items()}
    specs["scale"] = replace(specs["scale"], tp_partial=True)
    local = params["cut"].shape[0]
    specs["cut"] = replace(
        specs["cut"],
        global_shape=(ROWS, toy.WIDTH),
        offsets=(local * mesh.tp_rank, 0),
        tp_dim=0,
    )
    return specs


def _train(driver: Plain) -> None:
    """Accumulate over synced and unsynced backwards, so that what is reduced is opened again."""
    for step in range(STEPS):
        for part, sync in enumerate((True, False, True)):
            driver.backward(driver.forward(driver.rows(batch(3 * step + part))), sync=sync)
        driver.record_gradients()
        driver.clip(0.5)
        driver.clip(0.4, norm_type=float("inf"))
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def _run_partial(ctx: Context, tp: int, fault: str) -> Trace:
    mesh = toy.make_mesh(ctx.world_size, tp=tp)
    local = ROWS // tp
    model = Layer(slice(local * mesh.tp_rank, local * (mesh.tp_rank + 1)))
    specs = _layer_specs(model, mesh)
    if fault == "partial not summed":
        specs["scale"] = replace(specs["scale"], tp_partial=False)
    driver = Sharded(model, adamw, mesh, specs=specs)
    if fault == "reduced slice brought by every rank":
        for bucket in driver.reducer.buckets:
            bucket.grads._primary = True
    _train(driver)
    return driver.finish()


def _joined(traces: list[Trace], tp: int) -> Trace:
    """Put the tp ranks' cuts of the first replica together."""
    joined = traces[0]
    pairs = [(joined.parameters, [t.parameters for t in traces[:tp]])]
    for step, gradients in enumerate(joined.gradients):
        pairs.append((gradients, [t.gradients[step] for t in traces[:tp]]))
    for target, parts in pairs:
        target["cut"] = torch.cat([part["cut"] for part in parts])
    return joined


@pytest.mark.parametrize(("world_size", "tp"), [(2, 2), (4, 2), (4, 4)])
def test_partial_gradients_are_summed_over_tp(world_size: int, tp: int) -> None:
    driver = Plain(Layer(), adamw)
    _train(driver)
    expected = driver.finish()
    traces = run_ranks(_run_partial, world_size, tp, "")
    for trace in traces:
        assert trace.norms == traces[0].norms, "the norm has the same bits on every rank"
        assert torch.equal(trace.parameters["scale"], traces[0].parameters["scale"])
    assert_same(_joined(traces, tp), expected, rel=1e-11)


@pytest.mark.parametrize("fault", ["partial not summed", "reduced slice brought by every rank"])
def test_a_planted_fault_of_tp_is_found(fault: str) -> None:
    driver = Plain(Layer(), adamw)
    _train(driver)
    expected = driver.finish()
    trace = _joined(run_ranks(_run_partial, 2, 2, fault), 2)
    with pytest.raises(AssertionError):
        assert_same(trace, expected, rel=1e-11)


# -- tied weights ----------------------------------------------------------------------------------


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = _init(toy.WIDTH, 300, seed=4)
        self.first = _init(300, seed=5)

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.embed) * self.first).square().sum(1).mean() / 100


class Last(nn.Module):
    def __init__(self, embed: nn.Parameter | None = None) -> None:
        super().__init__()
        self.last = _init(300, seed=6)
        self.head = _init(toy.WIDTH, 300, seed=4) if embed is None else embed

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x @ self.head) * self.last).sum(1).mean() / 100


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = First()
        self.b = Last(self.a.embed)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def _call(driver: Plain, seed: int) -> Iterator[Tensor]:
    for part in range(2):
        yield driver.forward(driver.rows(batch(10 * seed + part))) / 2


def _train_tied(driver: Plain) -> None:
    for step in range(STEPS):
        for part, sync in enumerate((False, True, True)):
            seed = 3 * step + part
            call = driver.call(lambda seed=seed: _call(driver, seed), sync=sync)
            driver.release(call, 0.5)
        driver.record_gradients()
        driver.clip(0.1)
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def _run_tied(ctx: Context, fault: str) -> Trace:
    mesh = toy.make_mesh(ctx.world_size, pp=2)
    model = First() if mesh.is_first_stage else Last()
    params = dict(model.named_parameters())
    specs = {name: ShardSpec.replicated(name, p) for name, p in params.items()}
    tied = "embed" if mesh.is_first_stage else "head"
    if fault != "copies not summed":
        owner = mesh.is_first_stage or fault == "copy counted"
        specs[tied] = replace(specs[tied], tie="embed", tie_owner=owner)
    driver = Sharded(model, adamw, mesh, specs=specs)
    assert driver.reducer.buckets[-1].key.tie == specs[tied].tie
    _train_tied(driver)
    return driver.finish()


def _joined_stages(traces: list[Trace], dp: int) -> Trace:
    first, last = traces[0], traces[dp]
    names = {"embed": "a.embed", "first": "a.first"}

    def rename(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, Tensor]:
        return {names[name]: value for name, value in a.items()} | {"b.last": b["last"]}

    pairs = zip(first.gradients, last.gradients, strict=True)
    gradients = [rename(a, b) for a, b in pairs]
    return Trace(rename(first.parameters, last.parameters), gradients, first.norms)


@pytest.mark.parametrize("world_size", [2, 4])
def test_copies_of_a_tied_weight_stay_one_weight(world_size: int) -> None:
    driver = Plain(Both(), adamw)
    _train_tied(driver)
    expected = driver.finish()
    traces = run_ranks(_run_tied, world_size, "")
    dp = world_size // 2
    for first, last in zip(traces[:dp], traces[dp:], strict=True):
        assert torch.equal(first.parameters["embed"], last.parameters["head"]), "to the last bit"
        assert first.norms == last.norms
    assert_same(_joined_stages(traces, dp), expected, rel=1e-11)


@pytest.mark.parametrize("fault", ["copies not summed", "copy counted"])
def test_a_planted_fault_of_ties_is_found(fault: str) -> None:
    driver = Plain(Both(), adamw)
    _train_tied(driver)
    expected = driver.finish()
    trace = _joined_stages(run_ranks(_run_tied, 2, fault), 1)
    with pytest.raises(AssertionError):
        assert_same(trace, expected, rel=1e-11)
