"""One sharded module: attached optimizers, shared buffers, and how it is given back."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD

from goose_strategy.errors import BatchError, ConfigError
from goose_strategy.runtime import model as runtime_model
from goose_strategy.runtime.model import ShardedModel
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import message, started


def step(runtime: Any, loss: Tensor, *optimizers: Any) -> None:
    with runtime.backward(loss):
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _attached(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with started(1, 1) as runtime:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        handle = runtime.shard_module(module)
        first = SGD(module[0].parameters(), lr=0.1, momentum=0.9)
        second = SGD(module[1].parameters(), lr=0.1, momentum=0.9)
        handle.attach([first])
        inputs = torch.ones(1, 2)
        step(runtime, module(inputs).sum(), first)
        momentum = [s["momentum_buffer"].clone() for s in handle.shards[0].states.values()]
        handle.add(second)
        kept = [s["momentum_buffer"] for s in handle.shards[0].states.values()]
        found["kept"] = all(torch.equal(a, b) for a, b in zip(momentum, kept, strict=True))
        found["order"] = handle.optimizers == [first, second]
        found["shards"] = handle.shards_of(second) == [handle.shards[1]]
        before = handle.reducer
        lbfgs = LBFGS(module.parameters())
        found["unsupported"] = message(lambda: handle.attach([lbfgs]), ConfigError)
        twice = SGD(module[1].parameters(), lr=0.1)
        found["twice"] = message(lambda: handle.add(twice), ConfigError)
        found["untouched"] = handle.reducer is before and handle.optimizers == [first, second]
        handle.attach([second])
        found["replaced"] = handle.optimizers == [second] and handle.shards_of(first) == []
    return found


def test_optimizers_are_attached_replaced_and_added() -> None:
    for found in run_ranks(_attached, 2):
        assert found["kept"], "the first optimizer lost its momentum to the second"
        assert found["order"]
        assert found["shards"]
        assert "LBFGS" in found["unsupported"]
        assert "held twice" in found["twice"]
        assert found["untouched"]
        assert found["replaced"]


def _late_optimizer(ctx: Context) -> bool:
    """Gradients that were there before the optimizer are stepped by it."""
    with started(1, 1) as runtime:
        module = nn.Linear(2, 1, bias=False)
        handle = runtime.shard_module(module)
        before = module.weight.detach().clone()
        loss = module(torch.full((1, 2), float(ctx.rank))).sum()
        with runtime.backward(loss):
            loss.backward()
        optimizer = SGD(module.parameters(), lr=1.0)
        handle.add(optimizer)
        optimizer.step()
        return torch.equal(module.weight, before - 0.5)


def test_an_optimizer_may_come_after_the_backward() -> None:
    assert run_ranks(_late_optimizer, 2) == [True, True]


# -- buffers ------------------------------------------------------------------------------------


def _shared_buffers(ctx: Context) -> dict[str, Any]:
    shared: list[int] = []
    found: dict[str, Any] = {}
    broadcast = runtime_model.broadcast_buffers

    def counted(places: Any, mesh: Any) -> None:
        shared.append(len(places))
        broadcast(places, mesh)

    with started(1, 1) as runtime, mock.patch.object(runtime_model, "broadcast_buffers", counted):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        runtime.shard_module(module)
        inputs = torch.randn(4, 2) + ctx.rank
        module(inputs)
        module(inputs)
        found["training"] = list(shared)
        module.eval()
        module(inputs)
        module(inputs)
        found["evaluating"] = list(shared)
        found["mean"] = module[1].running_mean.clone()
        quiet = nn.Sequential(nn.BatchNorm1d(2))
        runtime.shard_module(quiet, hook_forward=False)
        quiet(inputs)
        found["announced only"] = list(shared)
        runtime.before_step(quiet)
        found["announced"] = list(shared)
        plain = nn.Linear(2, 2)
        runtime.shard_module(plain)
        plain(inputs)
        found["none"] = list(shared)
    return found


def test_buffers_are_shared_before_each_use_of_changed_ones() -> None:
    first, second = run_ranks(_shared_buffers, 2)
    for found in (first, second):
        assert found["training"] == [3, 3]
        assert found["evaluating"] == [3, 3, 3], "once more, as the last forward changed them"
        assert found["announced only"] == [3, 3, 3]
        assert found["announced"] == [3, 3, 3, 3]
        assert found["none"] == [3, 3, 3, 3]
    assert torch.equal(first["mean"], second["mean"])


# -- given back ---------------------------------------------------------------------------------


def _given_back(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    module = nn.ModuleDict({"lm": tiny_model("llama")})
    whole = {name: p.detach().clone() for name, p in module.named_parameters()}
    with started(2, 1) as first:
        held = first.shard_module(module)
        with started(1, 1) as second:
            taken = second.shard_module(module)
            found["closed"] = (held.closed, taken.closed)
            found["known"] = (first.model_of(module) is None, second.model_of(module) is taken)
            found["values"] = all(torch.equal(p, whole[n]) for n, p in module.named_parameters())
            loss = module.lm(**rows_of(batches(1)[0], ctx.rank, 2)).loss
            with second.backward(loss):
                loss.backward()
            # The first runtime has nothing to do with it any more.
            with first.backward(loss, module):
                pass
            found["left alone"] = held.reducer is None
        found["end"] = taken.closed
    found["clean"] = [
        k for k in (*vars(module), *vars(module.lm)) if "goose" in k or k == "forward"
    ]
    found["hooks"] = len(module._forward_pre_hooks)
    return found


def test_a_module_goes_from_one_runtime_to_another() -> None:
    for found in run_ranks(_given_back, 2):
        assert found["closed"] == (True, False)
        assert found["known"] == (True, True)
        assert found["values"]
        assert found["left alone"]
        assert found["end"]
        assert found["clean"] == []
        assert found["hooks"] == 0


def _never_sharded(ctx: Context) -> list[str]:
    with started(1, 1) as runtime:
        handle = ShardedModel(nn.Linear(1, 1), runtime.mesh, runtime.config, None)
        with handle.watch("nobody watches"):
            pass
        texts = [
            message(lambda: handle.surgery, ConfigError),
            message(lambda: handle.run_pipeline([], listed=False, grad=False), ConfigError),
        ]
        handle.close()
        return texts


def test_what_was_not_sharded_says_so() -> None:
    for texts in run_ranks(_never_sharded, 1):
        assert texts == ["The module is not sharded yet.", "This module is not cut into stages."]


def _frozen(ctx: Context) -> tuple[bool, float, float, str]:
    """A frozen model runs through the pipeline, and there is nothing to train."""
    with started(1, 2) as runtime:
        model = tiny_model("llama").requires_grad_(False)
        handle = runtime.shard_module(model)
        loss = model(**batches(1)[0]).loss
        again = model(**batches(1)[0]).loss
        refused = message(lambda: runtime.backward(loss).__enter__(), BatchError)
        trains = loss.requires_grad or handle.reducer is not None
        return trains, loss.item(), again.item(), refused


def test_a_frozen_model_has_a_loss_without_a_graph() -> None:
    for trains, loss, again, refused in run_ranks(_frozen, 2):
        assert not trains
        assert "no parameter of the model has requires_grad=True" in refused
        assert loss == again > 0
