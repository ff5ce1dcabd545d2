"""A module from the meta device gets memory, and is not trained before it has values."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from goose_strategy.compat.weights import meta_model
from goose_strategy.errors import ConfigError
from goose_strategy.runtime.filling import fill, refuse_unfilled
from tests.harness.models import batches
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.hub.checkpoints import CONFIGS, hub_model
from tests.runtime.start import message, started


def _empty(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = meta_model(CONFIGS["llama"](), dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with started(2, 2) as runtime:
        handle = runtime.shard_module(model, optimizers=[optimizer])
        found["names"] = handle.unfilled == [n for n, _ in model.named_parameters()]
        found["nan"] = all(bool(p.isnan().all()) for p in model.parameters())
        expected = dict(hub_model("llama").named_buffers())
        found["buffers"] = all(torch.equal(b, expected[n]) for n, b in model.named_buffers())
        batch = batches(1)[0]
        found["forward"] = message(lambda: model(**batch), ConfigError)
        found["step"] = message(lambda: runtime.before_step(model), ConfigError)
    return found


def test_weights_without_values_are_not_trained() -> None:
    for found in run_ranks(_empty, 4):
        assert found["names"]
        assert found["nan"]
        assert found["buffers"]
        assert "have no values" in found["forward"]
        assert "fabric.load" in found["step"]


def test_any_module_gets_memory() -> None:
    module = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.BatchNorm1d(2, device="meta"))
    names = fill(module, {}, torch.device("cpu"))
    assert "0.weight" in names
    assert "1.running_mean" in names
    assert all(bool(p.isnan().all()) for p in module.parameters())


def test_nothing_missing_is_no_refusal() -> None:
    refuse_unfilled([])
