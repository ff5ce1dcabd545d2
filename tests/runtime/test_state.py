"""What a checkpoint holds of a sharded module, and what a whole state dict brings back."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW

from goose_strategy.checkpoint.load import open_checkpoint
from goose_strategy.checkpoint.save import Contents, save_checkpoint
from goose_strategy.errors import CheckpointError
from goose_strategy.runtime.state import (
    identity_of,
    load_model_and_optimizers,
    load_whole_state_dict,
    model_tensors,
    optimizer_contents,
    origins_of,
)
from tests.harness.models import batches, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import message, started


def state(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def _whole(ctx: Context) -> dict[str, Any]:
    whole = tiny_model("llama", tied=True, seed=1).state_dict()
    found: dict[str, Any] = {}
    with started(2, 2) as runtime:
        model = tiny_model("llama", tied=True)
        handle = runtime.shard_module(model)
        before = state(model)
        wrong = {**whole, "model.norm.weight": torch.ones(3)}
        # Only the last stage has the norm, so only there can its shape be wrong.
        found["shape"] = (
            message(partial(load_whole_state_dict, handle, wrong, strict=True), CheckpointError)
            if runtime.mesh.is_last_stage
            else ""
        )
        found["missing"] = message(
            partial(load_whole_state_dict, handle, {}, strict=True), CheckpointError
        )
        found["unchanged"] = all(torch.equal(before[n], p) for n, p in model.named_parameters())
        load_whole_state_dict(handle, {}, strict=False)
        load_whole_state_dict(handle, whole, strict=True)
        expected = {}
        for name, spec in handle.surgery.specs.items():
            part = whole[name]
            for dim, (start, length) in enumerate(zip(spec.offsets, spec.local_shape, strict=True)):
                part = part.narrow(dim, start, length)
            expected[name] = part
        found["loaded"] = all(torch.equal(expected[n], p) for n, p in model.named_parameters())
        found["identity"] = identity_of(handle)
        tensors = {str(t.path[1]): t for t in model_tensors("entry", handle)}
        kept = model_tensors("entry", handle, lambda name, _: "norm" in name)
        found["entries"] = {t.path[0] for t in tensors.values()}
        found["names"] = sorted(tensors)
        found["kept"] = sorted(str(t.path[1]) for t in kept)
    return found


def test_a_whole_state_dict_fills_every_shard() -> None:
    ranks = run_ranks(_whole, 4)
    for found in ranks:
        assert "is missing" in found["missing"]
        assert found["unchanged"]
        assert found["loaded"]
        assert found["identity"] == {"class": "LlamaForCausalLM"}
        assert found["entries"] == {"entry"}
        assert found["kept"] == [name for name in found["names"] if "norm" in name]
    assert "model.norm.weight has shape=(3,), not (32,)" in ranks[3]["shape"]
    names = {name for found in ranks for name in found["names"]}
    assert names <= set(tiny_model("llama", tied=True).state_dict())


def _there_and_back(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    path = ctx.tmp_path / "state.ckpt"
    with started(1, 2) as runtime:
        model = tiny_model("llama")
        optimizer = AdamW(model.parameters(), lr=1e-2)
        handle = runtime.shard_module(model, optimizers=[optimizer])
        loss = model(**batches(1)[0]).loss
        with runtime.backward(loss):
            loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.5
        tensors, objects = optimizer_contents("optimizer", handle, optimizer)
        contents = Contents(
            tensors=[*model_tensors("model", handle), *tensors],
            objects=objects,
            identity=identity_of(handle),
        )
        save_checkpoint(path, contents, mesh=runtime.mesh)
        expected = state(model)
    with started(1, 2) as runtime:
        model = tiny_model("llama", seed=1)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        handle = runtime.shard_module(model, optimizers=[optimizer])
        checkpoint = open_checkpoint(path, mesh=runtime.mesh)
        two = SGD([{"params": [p]} for p in list(model.parameters())[:2]], lr=0.1)
        load = partial(load_model_and_optimizers, mesh=runtime.mesh, strict=True)
        stranger = {"optimizer": (handle, two)}
        found["stranger"] = message(
            partial(load, checkpoint, {"model": handle}, stranger), CheckpointError
        )
        load(checkpoint, {}, {})
        found["untouched"] = not torch.equal(
            next(iter(expected.values())), next(model.parameters())
        )
        load(checkpoint, {"model": handle}, {"optimizer": (handle, optimizer)})
        found["loaded"] = all(torch.equal(expected[n], p) for n, p in model.named_parameters())
        found["lr"] = optimizer.param_groups[0]["lr"]
        found["params"] = len(optimizer.param_groups[0]["params"]) == len(expected)
        found["steps"] = [float(s["step"]) for s in handle.shards[0].states.values()]
        handle.attach([two])
        found["groups"] = message(
            partial(load, checkpoint, {"model": handle}, stranger), CheckpointError
        )
    return found


def test_weights_and_optimizers_come_back() -> None:
    for found in run_ranks(_there_and_back, 2):
        assert "SGD is not set up with the model" in found["stranger"]
        assert found["untouched"]
        assert found["loaded"]
        assert found["lr"] == 0.5
        assert found["params"]
        assert found["steps"] == [1.0] * len(found["steps"]) != []
        assert "'optimizer' has 1 parameter groups in the checkpoint, but 2 here" in found["groups"]


def _undescribed(ctx: Context) -> Any:
    with started(1, 1) as runtime:
        model = tiny_model("llama")
        handle = runtime.shard_module(model)
        (plain,) = origins_of(handle)
        model.config.extra = {1, 2}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            nothing = origins_of(handle)
        return plain["kind"], nothing, [str(warning.message) for warning in caught]


def test_a_config_that_cannot_be_written_does_not_keep_a_checkpoint_from_being_saved() -> None:
    ((kind, nothing, (warning,)),) = run_ranks(_undescribed, 1)
    assert kind == "LlamaForCausalLM"
    assert nothing == []
    assert "cannot be exported to the hub later" in warning
