"""An optimizer that was not set up does not step what it would step wrongly."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn, optim

from goose_strategy.errors import ConfigError
from goose_strategy.privacy.config import PrivacyConfig
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import CPU, message, started


def _trained(
    runtime: ParallelRuntime, ctx: Context | None, *, set_up: bool = False
) -> tuple[nn.Module, optim.SGD]:
    """Return a model whose gradients wait for a step, and an optimizer that nobody set up."""
    model = tiny_model("llama")
    runtime.shard_module(model)
    stray = optim.SGD(model.parameters(), lr=0.1)
    if set_up:
        runtime.attach_optimizer(stray)
    batch = batches(1)[0]
    loss = model(**(batch if ctx is None else rows_of(batch, ctx.rank, ctx.world_size))).loss
    with runtime.backward(loss):
        loss.backward()
    return model, stray


def _weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()]).clone()


def _strays(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with started() as runtime:
        model, stray = _trained(runtime, ctx)
        before = _weights(model)
        found["replicas"] = message(stray.step, ConfigError)
        found["untouched"] = torch.equal(before, _weights(model))
        other = nn.Linear(2, 2)
        other(torch.ones(2)).sum().backward()
        optim.SGD(other.parameters(), lr=0.1).step()
        runtime.attach_optimizer(stray)
        loss = model(**rows_of(batches(1)[0], ctx.rank, ctx.world_size)).loss
        with runtime.backward(loss):
            loss.backward()
        stray.step()
        found["set up"] = _weights(model)
    found["given back"] = message(lambda: (stray.step(), 1 / 0), ZeroDivisionError)

    found["parts"] = []
    for set_up in (False, True):
        with started(1, 2) as runtime:
            model, stray = _trained(runtime, None, set_up=set_up)
            stray.step()
            found["parts"].append(_weights(model))
    return found


def test_a_step_on_slices_is_refused_and_one_on_whole_gradients_is_not() -> None:
    first, second = run_ranks(_strays, 2)
    for found in (first, second):
        assert (
            "SGD steps parameters of LlamaForCausalLM but was not set up: with dp=2"
            in (found["replicas"])
        )
        assert "fabric.setup_optimizers(optimizer)" in found["replicas"]
        assert found["untouched"]
        # One stage of two, one replica: gradients are whole.
        raw, attached = found["parts"]
        torch.testing.assert_close(raw, attached, rtol=0, atol=1e-12)
    assert torch.equal(first["set up"], second["set up"])


def _private(_ctx: Context) -> tuple[str, str]:
    privacy = PrivacyConfig(noise_multiplier=1.0, logical_batch_size=4, sampling="none")
    runtime = ParallelRuntime(RuntimeConfig(privacy=privacy))
    runtime.start(CPU)
    model = tiny_model("llama")
    runtime.shard_module(model)
    stray = optim.SGD(model.parameters(), lr=0.1)
    model(**batches(1)[0]).loss.backward()
    refused = message(stray.step, ConfigError)
    runtime.stop()
    del model, runtime
    gc.collect()
    stray.step()
    return refused, "steps again"


def test_a_step_without_noise_is_refused_with_one_replica_too() -> None:
    (found,) = run_ranks(_private, 1)
    assert "its step would be one without noise" in found[0]
