"""Ghosts look like weights, cost nothing, and follow their module.

torch calls ``_apply`` of every submodule from ``to``, ``cuda``, ``half`` and ``to_empty``, and
keeps the hooks of a module in four dicts. If either moves, ghosts are left behind on the old device
(``test_ghosts_follow_their_module``) or hooks of absent layers run (``test_hooks_are_dropped``).
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from goose_strategy.pipeline_parallel.ghost import drop_hooks, make_ghosts, place_ghosts


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def ghostly(rows: int = 1000) -> nn.Embedding:
    embedding = nn.Embedding(rows, 16)
    make_ghosts(embedding, ["weight"])
    return embedding


def test_a_ghost_is_no_parameter_and_has_no_memory() -> None:
    embedding = ghostly()
    assert list(embedding.named_parameters()) == []
    assert embedding.state_dict() == {}
    assert embedding.weight.shape == (1000, 16)
    assert embedding.weight.dtype == torch.float32
    assert bytes_of(embedding.weight) == 4


def test_the_module_still_runs() -> None:
    out = ghostly()(torch.tensor([[3, 999]]))
    assert torch.equal(out, torch.zeros(1, 2, 16))
    assert not out.requires_grad


def test_ghosts_follow_their_module() -> None:
    model = nn.Sequential(ghostly(), nn.Linear(16, 2))
    model.to(torch.float64)
    assert model[0].weight.dtype == torch.float64
    assert bytes_of(model[0].weight) == 8
    assert model[1].weight.dtype == torch.float64
    model.to("meta")
    assert model[0].weight.is_meta
    model.to_empty(device="cpu")
    assert torch.equal(model[0].weight, torch.zeros(1000, 16, dtype=torch.float64))
    assert bytes_of(model[0].weight) == 8


def test_a_weight_may_come_back() -> None:
    embedding = ghostly()
    embedding.weight = nn.Parameter(torch.ones(1000, 16))
    embedding.to(torch.float64)
    assert [name for name, _ in embedding.named_parameters()] == ["weight"]
    assert embedding(torch.tensor([3])).sum() == 16


def test_buffers_can_be_ghosts_too() -> None:
    norm = nn.BatchNorm1d(7)
    make_ghosts(norm, ["weight"])
    make_ghosts(norm, ["running_mean", "num_batches_tracked"])
    assert set(norm.state_dict()) == {"bias", "running_var"}
    norm.to(torch.float64)
    assert norm.weight.dtype == norm.running_mean.dtype == torch.float64
    assert norm.num_batches_tracked.dtype == torch.int64


def test_a_deep_copy_has_ghosts_of_its_own() -> None:
    embedding = ghostly()
    twin = copy.deepcopy(embedding)
    twin.to(torch.float64)
    assert twin.weight.dtype == torch.float64
    assert embedding.weight.dtype == torch.float32


def test_hooks_are_dropped() -> None:
    linear = nn.Linear(2, 2)
    called = []
    linear.register_forward_pre_hook(lambda *_: called.append("pre"))
    linear.register_forward_hook(lambda *_: called.append("post"), with_kwargs=False)
    linear.register_full_backward_pre_hook(lambda *_: called.append("pre backward"))
    linear.register_full_backward_hook(lambda *_: called.append("backward"))
    drop_hooks(linear)
    linear(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert called == []


def test_ghosts_of_a_model_cut_on_the_meta_device_are_placed() -> None:
    model = nn.Sequential(ghostly(), ghostly().to("meta"), nn.Linear(2, 2, device="meta"))
    kept = model[0].weight
    place_ghosts(model, torch.device("cpu"))
    assert model[0].weight is kept
    assert torch.equal(model[1].weight, torch.zeros(1000, 16))
    assert bytes_of(model[1].weight) == 4
    assert model[2].weight.is_meta
