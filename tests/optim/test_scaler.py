"""Loss scaling in fp16: one decision for all ranks, torch's scaler on one process beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from goose_strategy.compat.torch import ShardedGradScaler
from goose_strategy.optim.config import ZeroConfig
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.compare import token_loss
from tests.harness.models import Batch, batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import CPU

STEPS = 12
INIT, INTERVAL = 2.0**14, 3
SPOILT = {5: 0, 7: 3}
"""In these steps a gradient becomes infinite: of a parameter of this layer."""


class Spoil:
    """Makes one element of a layer's gradient infinite, wherever that layer is trained."""

    def __init__(self, model: nn.Module) -> None:
        self.layer: int | None = None
        for number, layer in enumerate(model.model.layers):
            for name, param in layer.named_parameters():
                if name == "mlp.down_proj.weight":
                    param.register_hook(lambda grad, number=number: self(grad, number))

    def __call__(self, grad: Tensor, number: int) -> Tensor:
        if number != self.layer:
            return grad
        grad = grad.clone()
        grad[0, 1] = torch.inf
        return grad


def global_batches() -> list[Batch]:
    return batches(STEPS, batch_size=8)


def _alone(kind: str, autocast: bool) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = tiny_model("llama", tied=True, dtype=torch.float32)
    spoil = Spoil(model)
    optimizer = made(kind, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT, growth_interval=INTERVAL)
    scales, norms = [], []
    for step, batch in enumerate(global_batches()):
        spoil.layer = SPOILT.get(step)
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            logits = model(**batch).logits
        scaler.scale(token_loss(logits.float(), batch["labels"])).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, norms, {n: p.detach().clone() for n, p in model.named_parameters()}


def made(kind: str, model: nn.Module) -> optim.Optimizer:
    params = list(model.parameters())
    if kind == "sgd":
        return optim.SGD(params, lr=0.05, momentum=0.9)
    return optim.AdamW(params, lr=1e-3, fused=True if kind == "fused" else None)


def _scaled(
    ctx: Context, mesh: tuple[int, int], kind: str, autocast: bool, zero: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    tp, pp = mesh
    runtime = ParallelRuntime(
        RuntimeConfig(
            tp=tp,
            pp=pp,
            pipeline=PipelineConfig(num_microbatches=2),
            zero=ZeroConfig(bucket_numel=4096, **zero),
        )
    )
    runtime.start(CPU)
    user = torch.amp.GradScaler("cpu", init_scale=INIT, growth_interval=INTERVAL)
    scaler = runtime.scaler = ShardedGradScaler.over(user, runtime.unscale)
    model = tiny_model("llama", tied=True, dtype=torch.float32)
    spoil = Spoil(model)
    optimizer = made(kind, model)
    runtime.shard_module(model, optimizers=[optimizer])
    scales, norms, losses = [], [], []
    for step, batch in enumerate(global_batches()):
        spoil.layer = SPOILT.get(step)
        rows = rows_of(batch, runtime.mesh.dp_rank, runtime.mesh.dp_size)
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            loss = model(**rows).loss
        losses.append(loss.item())
        assert loss.isfinite(), "the loss that the user sees is not scaled"
        scaled = scaler.scale(loss)
        with runtime.backward(scaled):
            scaled.backward()
        scaler.unscale_(optimizer)
        norms.append(runtime.clip_grad_norm(optimizer, 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    named = {n: p.detach().clone() for n, p in model.named_parameters() if p.shape != (0,)}
    runtime.stop()
    return scales, norms, named


MESHES = [(1, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 8)]


@pytest.mark.parametrize(("tp", "pp", "world"), MESHES)
@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_an_overflow_on_one_stage_skips_on_all_and_the_scale_is_torchs(
    kind: str, tp: int, pp: int, world: int
) -> None:
    scales, norms, parameters = _alone(kind, autocast=False)
    assert len(set(scales)) == 3, "it grows and backs off"
    for mine, its_norms, named in run_ranks(_scaled, world, (tp, pp), kind, False, {}):
        assert mine == scales
        for norm, expected in zip(its_norms, norms, strict=True):
            assert norm == pytest.approx(expected, rel=1e-4, nan_ok=True)
        for name, value in named.items():
            if name in parameters and value.shape == parameters[name].shape:
                gap = (value - parameters[name]).norm() / parameters[name].norm()
                assert gap < (1e-5 if kind == "sgd" else 1e-3), name


@pytest.mark.parametrize(("tp", "pp", "world"), [(1, 1, 2), (1, 2, 2), (2, 2, 8)])
def test_fp16_trains_as_it_does_in_one_process(tp: int, pp: int, world: int) -> None:
    scales, norms, parameters = _alone("sgd", autocast=True)
    for mine, its_norms, named in run_ranks(_scaled, world, (tp, pp), "sgd", True, {}):
        assert mine == scales
        for norm, expected in zip(its_norms, norms, strict=True):
            assert norm == pytest.approx(expected, rel=2e-2, nan_ok=True)
        for name, value in named.items():
            if name in parameters and value.shape == parameters[name].shape:
                gap = (value - parameters[name]).norm() / parameters[name].norm()
                assert gap < 2e-3, name


def test_narrow_moments_go_with_it() -> None:
    zero = {"preset": "compact", "main": "fp32"}
    scales, _, _ = _alone("sgd", autocast=True)
    for mine, _, _ in run_ranks(_scaled, 2, (1, 2), "adamw", True, zero):
        assert mine == scales


def small_loss(outputs: Any, _microbatch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a loss whose gradient is below what fp16 holds, and the number of rows."""
    logits = outputs.logits.to(torch.promote_types(outputs.logits.dtype, torch.float32))
    return logits.square().sum() * 1e-9, torch.tensor(logits.shape[0])


def _small(ctx: Context, scaled: bool) -> float:
    pipeline = PipelineConfig(num_microbatches=2, loss_fn=small_loss)
    runtime = ParallelRuntime(RuntimeConfig(pp=2, pipeline=pipeline))
    runtime.start(CPU)
    user = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=scaled)
    scaler = runtime.scaler = ShardedGradScaler.over(user, runtime.unscale)
    model = tiny_model("llama", dtype=torch.float32)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    runtime.shard_module(model, optimizers=[optimizer])
    with torch.autocast("cpu", dtype=torch.float16):
        loss = scaler.scale(model(**batches(1)[0]).loss)
    with runtime.backward(loss):
        loss.backward()
    scaler.unscale_(optimizer)
    norm = runtime.clip_grad_norm(optimizer, 1e9).item()
    runtime.stop()
    return norm


def test_the_scale_is_applied_inside_of_the_schedule() -> None:
    model = tiny_model("llama", dtype=torch.float64)
    total, count = small_loss(model(**batches(1)[0]), {})
    (total / count).backward()
    exact = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert run_ranks(_small, 2, True)[0] == pytest.approx(exact, rel=0.01)
    # What would be multiplied by the scale after the schedule alone is lost between its stages.
    assert run_ranks(_small, 2, False)[0] < 0.1 * exact
