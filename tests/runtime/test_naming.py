"""Optimizers keep the parameters that this rank kept; foreign and doubled ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW

from goose_strategy.errors import ConfigError
from goose_strategy.runtime.naming import (
    check_storages,
    check_ties,
    orders_of,
    owners,
    record_groups,
    refill_groups,
    strip_placeholders,
)
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import mesh_of, message, started


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def grouped(module: nn.Sequential) -> SGD:
    return SGD([{"params": module[0].parameters()}, {"params": [module[1].weight], "lr": 1.0}], 0.1)


def test_groups_are_remembered_by_name() -> None:
    module = two_layers()
    assert record_groups(module, [grouped(module)]) == [[["0.weight", "0.bias"], ["1.weight"]]]
    assert record_groups(module, []) == []


def test_places_are_those_in_each_optimizer_and_in_the_module() -> None:
    module = two_layers()
    optimizer = SGD(list(module.parameters())[::-1], 0.1)
    orders = orders_of(module, [optimizer], record_groups(module, [optimizer]))
    names = [name for name, _ in module.named_parameters()]
    assert list(orders[None]) == names
    assert list(orders[optimizer]) == names[::-1]


def test_two_parameters_over_the_same_memory_are_refused() -> None:
    module = two_layers()
    check_storages(module)
    module[1].weight = nn.Parameter(module[0].weight.detach().t()[:, :1].t())
    with pytest.raises(ConfigError, match=r"parameters 0\.weight and 1\.weight are two tensors"):
        check_storages(module)
    module.requires_grad_(False)
    check_storages(module)


def test_one_parameter_in_two_places_is_no_shared_memory() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    check_storages(module)


def test_foreign_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"SGD holds 3 parameters.*first shape: \(3, 2\)"):
        record_groups(two_layers(), [grouped(two_layers())])


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    module = two_layers()
    optimizer = AdamW(module.parameters())
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(ConfigError, match="AdamW has state already"):
        record_groups(module, [optimizer])


def test_groups_are_filled_with_what_is_left() -> None:
    module = two_layers()
    optimizer = grouped(module)
    recorded = record_groups(module, [optimizer])
    module[0].weight = nn.Parameter(torch.ones(1, 2))  # a slice of it
    module[0].register_parameter("bias", None)  # another stage's
    refill_groups(module, [optimizer], recorded, {})
    first, second = optimizer.param_groups
    assert first["params"] == [module[0].weight]
    assert second["params"] == [module[1].weight]
    assert second["lr"] == 1.0


def test_state_that_the_constructor_made_follows_the_parameters() -> None:
    module = two_layers()
    optimizer = Adagrad(module.parameters(), initial_accumulator_value=0.5)
    recorded = record_groups(module, [optimizer])
    module[0].weight = nn.Parameter(torch.ones(1, 2))
    module[0].register_parameter("bias", None)
    refill_groups(module, [optimizer], recorded, {})
    assert set(optimizer.state) == set(module.parameters())
    state = optimizer.state[module[0].weight]
    assert state["step"].item() == 0
    assert torch.equal(state["sum"], torch.full((1, 2), 0.5))
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(ConfigError, match="Adagrad has state already"):
        record_groups(module, [optimizer])


def test_a_tied_copy_takes_the_place_of_its_weight() -> None:
    module = two_layers()
    optimizer = SGD([module[0].weight], 0.1)
    recorded = record_groups(module, [optimizer])
    del module[0].weight
    refill_groups(module, [optimizer], recorded, {"1.weight": "0.weight"})
    assert optimizer.param_groups[0]["params"] == [module[1].weight]


def test_placeholders_go_and_parameters_stay() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = SGD([weight, nn.Parameter(torch.empty(0))], 0.1)
    strip_placeholders([optimizer])
    assert optimizer.param_groups[0]["params"] == [weight]


def test_every_held_parameter_has_one_owner() -> None:
    module = two_layers()
    optimizers = [SGD([module[1].bias], 0.1), grouped(module)]
    assert owners(module, optimizers) == {
        "1.bias": (0, 0),
        "0.weight": (1, 0),
        "0.bias": (1, 0),
        "1.weight": (1, 1),
    }
    with pytest.raises(ConfigError, match=r"parameter 0\.weight is held twice"):
        owners(module, [grouped(module), SGD([module[0].weight], 0.1)])
    with pytest.raises(ConfigError, match=r"shape \(3, 2\) that does not belong"):
        owners(module, [grouped(two_layers())])


# -- ties between stages ------------------------------------------------------------------------


def _ties(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with started(pp=2) as runtime:
        model = tiny_model("llama", tied=True)
        handle = runtime.shard_module(model)
        specs, mesh = handle.surgery.specs, runtime.mesh
        tie = {name: spec.tie for name, spec in specs.items() if spec.tie is not None}
        found["tie"] = tie
        together = [SGD(model.parameters(), lr=0.1)]
        check_ties(specs, owners(model, together), together, mesh)
        apart = [SGD(model.parameters(), lr=0.1 * (1 + mesh.pp_rank))]
        found["lr"] = message(
            lambda: check_ties(specs, owners(model, apart), apart, mesh), ConfigError
        )
        one_side = owners(model, together) if mesh.pp_rank else {}
        found["one side"] = message(
            lambda: check_ties(specs, one_side, together, mesh), ConfigError
        )
        check_ties(specs, {}, [], mesh)  # frozen on both
    with mesh_of(dp=2) as mesh:
        check_ties(specs, {}, [], mesh)  # no stages: nothing can drift apart
    return found


def test_both_copies_of_a_tied_weight_are_stepped_alike() -> None:
    first, last = run_ranks(_ties, 2)
    assert first["tie"] == {"model.embed_tokens.weight": "model.embed_tokens.weight"}
    assert last["tie"] == {"lm_head.weight": "model.embed_tokens.weight"}
    for rank in (first, last):
        assert "tied weight model.embed_tokens.weight" in rank["lr"]
        assert "'lr': '0.1'" in rank["lr"]
        assert "'lr': '0.2'" in rank["lr"]
        assert "None" in rank["one side"]
