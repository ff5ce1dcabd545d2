"""The verbs of a training step, called without Lightning."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from goose_strategy.errors import BatchError, ConfigError, MeshError
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.compare import token_loss
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import CPU, message, started


def test_nothing_exists_before_the_start() -> None:
    runtime = ParallelRuntime(RuntimeConfig())
    assert not runtime.started
    with pytest.raises(MeshError, match=r"fabric\.launch\(\), trainer\.fit\(\)"):
        _ = runtime.mesh
    runtime.fail(RuntimeError("nobody to tell"))
    runtime.stop()
    with runtime.watch("nothing"):
        pass
    with runtime.placeholders(nn.Linear(1, 1)):
        pass


@pytest.mark.parametrize(("tp", "pp", "world"), [(2, 1, 3), (3, 2, 8), (4, 4, 8)])
def test_sizes_must_multiply_to_the_world(tp: int, pp: int, world: int) -> None:
    runtime = ParallelRuntime(RuntimeConfig(tp=tp, pp=pp))
    with pytest.raises(ConfigError, match=f"tp={tp}.*pp={pp}.*{world}"):
        runtime.check_world(world)
    assert runtime.check_world(tp * pp * 3).dp == 3


def _life(ctx: Context) -> dict[str, Any]:
    threads = threading.active_count()
    runtime = ParallelRuntime(RuntimeConfig(pp=2))
    runtime.start(CPU)
    mesh = runtime.mesh
    runtime.start(CPU)
    found: dict[str, Any] = {"once": runtime.mesh is mesh}
    model = tiny_model("llama")
    found["same"] = runtime.shard_module(model) is runtime.shard_module(model)
    found["unknown"] = runtime.model_of(nn.Linear(1, 1)) is None
    found["votes"] = [
        runtime.vote(decision=ctx.rank == 0, everyone=everyone) for everyone in (True, False)
    ]
    runtime.stop()
    runtime.stop()
    found["stopped"] = not runtime.started and runtime.models == []
    found["patched"] = "forward" in vars(model)
    found["threads"] = threading.active_count() - threads
    return found


def test_a_runtime_starts_and_stops_once() -> None:
    for found in run_ranks(_life, 2):
        assert found["once"]
        assert found["same"]
        assert found["unknown"]
        assert found["votes"] == [False, True]
        assert found["stopped"]
        assert not found["patched"]
        assert found["threads"] == 0


def _optimizers(ctx: Context) -> dict[str, str]:
    with started(1, 2) as runtime:
        model = tiny_model("llama")
        runtime.shard_module(model)
        stranger = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        mixed = SGD([*model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)
        return {
            "stranger": message(lambda: runtime.attach_optimizer(stranger), ConfigError),
            "mixed": message(lambda: runtime.attach_optimizer(mixed), ConfigError),
            "clip": message(lambda: runtime.clip_grad_norm(stranger, 1.0), ConfigError),
            "value": message(lambda: runtime.clip_grad_value(stranger, 1.0), ConfigError),
            "module": message(lambda: runtime.attach_optimizers(nn.Linear(1, 1), []), ConfigError),
            "owner": str(runtime.owner_of(stranger)),
        }


def test_an_optimizer_needs_its_module() -> None:
    for found in run_ranks(_optimizers, 2):
        assert "SGD holds parameters of 0 sharded modules" in found["stranger"]
        assert "does not belong to the module" in found["mixed"]
        assert "SGD is not attached" in found["clip"]
        assert "SGD is not attached" in found["value"]
        assert "not sharded by this runtime" in found["module"]
        assert found["owner"] == "None"


def _contexts(ctx: Context) -> list[Any]:
    """Nested, with the flag off and on, and left by an exception."""
    seen = []
    with started(1, 1) as runtime:
        module = nn.Linear(1, 1)
        handle = runtime.shard_module(module)
        with runtime.no_sync(module):
            seen.append(handle.sync)
            with runtime.no_sync(module, enabled=False):
                seen.append(handle.sync)
            seen.append(handle.sync)
        seen.append(handle.sync)
        with suppress(ZeroDivisionError), runtime.no_sync(nn.Linear(1, 1)):
            seen.append(handle.sync)
            raise ZeroDivisionError
        seen.append(handle.sync)
        with runtime.local_loss(module):
            seen.append(handle.global_loss)
        seen.append(handle.global_loss)
        with runtime.local_loss(nn.Linear(1, 1)):
            seen.append(handle.global_loss)
    return seen


def test_settings_of_a_block_end_with_it() -> None:
    for seen in run_ranks(_contexts, 2):
        assert seen == [False, True, False, True, False, True, False, True, True]


def _local_losses(ctx: Context) -> tuple[float, float]:
    with started(1, 1) as runtime:
        model = tiny_model("llama")
        runtime.shard_module(model)
        mine = rows_of(batches(1)[0], ctx.rank, 2)
        with torch.no_grad():
            together = model(**mine).loss.item()
            with runtime.local_loss(model):
                # One rank alone: nobody waits.
                alone = model(**mine).loss.item() if ctx.rank else 0.0
        return together, alone


def test_a_local_loss_is_the_replicas_own() -> None:
    first, second = run_ranks(_local_losses, 2)
    assert first[0] == second[0]
    assert second[1] != second[0]


def _two_modules(ctx: Context) -> dict[str, Any]:
    torch.manual_seed(0)
    inputs = torch.full((1, 2), float(ctx.rank + 1))
    found: dict[str, Any] = {}
    with started(1, 1) as runtime:
        first, second = nn.Linear(2, 1), nn.Linear(2, 1)
        optimizers = [SGD(m.parameters(), lr=0.1) for m in (first, second)]
        for module, optimizer in zip((first, second), optimizers, strict=True):
            runtime.shard_module(module, optimizers=[optimizer])
        loss = (first(inputs) + 2 * second(inputs)).sum()
        with runtime.backward(loss, first):
            loss.backward()
        # The other module's gradients are summed when they are needed.
        runtime.clip_grad_norm(optimizers[1], 1e9)
        found["own"] = [
            runtime.models[i].reducer.full_gradients()["weight"].tolist() for i in (0, 1)
        ]
    return found


def test_a_loss_may_reach_two_modules() -> None:
    for found in run_ranks(_two_modules, 2):
        # Inputs are 1 and 2: their mean is 1.5.
        assert found["own"] == [[[1.5, 1.5]], [[3.0, 3.0]]]


def _clipping(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with started(1, 2) as runtime:
        model = tiny_model("llama")
        optimizer = SGD(model.parameters(), lr=0.1)
        handle = runtime.shard_module(model, optimizers=[optimizer])
        loss = model(**batches(1)[0]).loss
        with runtime.backward(loss):
            loss.backward()
        found["order"] = message(
            lambda: runtime.clip_grad_norm(optimizer, 1.0, norm_type=-1.0), ConfigError
        )
        runtime.clip_grad_value(optimizer, 1e-3)
        largest = max(p.grad.abs().max().item() for p in model.parameters())
        found["largest"] = largest
        found["norm"] = runtime.clip_grad_norm(optimizer, 1e-4).item()
        found["after"] = runtime.clip_grad_norm(optimizer, 1.0).item()
        model.zero_grad()
        loss = model(**batches(1)[0]).loss * (1 + runtime.mesh.pp_rank)
        with runtime.backward(loss):
            loss.backward()
        found["factors"] = message(lambda: runtime.clip_grad_norm(optimizer, 1.0), BatchError)
        found["handle"] = handle.reducer is not None
    return found


def test_clipping_refuses_alike_and_clips_alike() -> None:
    first, second = run_ranks(_clipping, 2)
    assert first["norm"] == second["norm"] > 1e-4
    for found in (first, second):
        assert "norm_type=-1.0" in found["order"]
        assert found["largest"] <= 1e-3
        assert found["after"] == pytest.approx(1e-4, rel=1e-4)
        assert "different factors" in found["factors"]


def _unclipped(ctx: Context) -> dict[str, Any]:
    """Steps without clipping: unequal factors, unequal sums of factors, then equal ones."""
    found: dict[str, Any] = {}
    with started(1, 2) as runtime:
        model = tiny_model("llama")
        optimizer = SGD(model.parameters(), lr=0.1)
        runtime.shard_module(model, optimizers=[optimizer])

        def train(*factors: float) -> None:
            optimizer.zero_grad()
            for factor in factors:
                loss = model(**batches(1)[0]).loss * factor
                with runtime.backward(loss):
                    loss.backward()
            optimizer.step()

        rank = runtime.mesh.rank
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        found["unequal"] = message(lambda: train(1.0 + rank), BatchError)
        found["by replica"] = message(lambda: train(1.0 + runtime.mesh.dp_rank), BatchError)
        found["second"] = message(lambda: train(1.0, 0.5 * rank), BatchError)
        found["kept"] = all(torch.equal(p, before[n]) for n, p in model.named_parameters())
        train(0.5, 0.25)
        found["moved"] = any(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    return found


def test_a_step_without_clipping_compares_the_factors_too() -> None:
    for found in run_ranks(_unclipped, 4):
        # The reducer averages over two replicas, so that each factor is doubled.
        assert "different factors, [2.0, 4.0, 6.0, 8.0] by rank" in found["unequal"]
        assert "different factors" in found["by replica"]
        assert "[2.0, 3.0, 4.0, 5.0] by rank" in found["second"]
        assert found["kept"]
        assert found["moved"]


def _alone(ctx: Context) -> list[float]:
    """One rank is a world too."""
    with started() as runtime:
        model = tiny_model("llama")
        optimizer = SGD(model.parameters(), lr=0.1)
        runtime.shard_module(model, optimizers=[optimizer])
        losses = []
        for batch in batches(2):
            loss = model(**batch).loss
            with runtime.backward(loss):
                loss.backward()
            runtime.clip_grad_norm(optimizer, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def test_a_world_of_one_rank_trains() -> None:
    ((first, second),) = run_ranks(_alone, 1)
    assert first != second


def _two_models(_ctx: Context) -> list[float]:
    """Two models of other widths and types take turns over the same neighbours."""
    found = []
    with started(1, 2) as runtime, torch.no_grad():
        models = [
            tiny_model("llama", dtype=torch.float32),
            tiny_model("llama"),
            tiny_model("llama", heads=2),
        ]
        for model in models:
            runtime.shard_module(model)
        for _ in range(2):
            found += [model(**batches(1)[0]).loss.item() for model in models]
    return found


def test_models_of_other_shapes_share_neighbours() -> None:
    """What a receiver is told of a message is that message's, not an earlier model's."""
    with torch.no_grad():
        alone = [
            token_loss(model(**_plain(batches(1)[0])).logits, batches(1)[0]["labels"]).item()
            for model in (
                tiny_model("llama", dtype=torch.float32),
                tiny_model("llama"),
                tiny_model("llama", heads=2),
            )
        ]
    for found in run_ranks(_two_models, 2):
        assert found == pytest.approx(alone * 2, rel=1e-6)


def _plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name != "labels"}
