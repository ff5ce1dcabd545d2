"""What has not been read says so by name, whatever is done with it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from goose_strategy.errors import ConfigError
from goose_strategy.hub.unread import UnreadParameter, forget_name, guard, unguarded


def unread() -> nn.Linear:
    layer = nn.Linear(3, 3, device="meta")
    guard({f"lm.{name}": param for name, param in layer.named_parameters()})
    return layer


def _in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.ones(3, 3))


def _part(layer: nn.Linear) -> None:
    layer.weight.data[0] = 1.0


ACTS: dict[str, Callable[[nn.Linear], Any]] = {
    "forward": lambda layer: layer(torch.ones(2, 3)),
    "to a device": lambda layer: layer.to("cpu"),
    "to nothing": lambda layer: layer.to_empty(device="cpu"),
    "initialised": lambda layer: nn.init.normal_(layer.weight),
    "copied into": _in_place,
    "written in part": _part,
    "saved": lambda layer: torch.save(layer.state_dict(), io.BytesIO()),
    "pickled": lambda layer: pickle.dumps(layer),
    "state dict to the host": lambda layer: layer.state_dict()["weight"].cpu(),
    "numpy": lambda layer: layer.weight.detach().numpy(),
    "listed": lambda layer: layer.weight.tolist(),
    "added to a number of the host": lambda layer: torch.add(torch.ones(3, 3), layer.weight),
    "stacked": lambda layer: torch.stack([torch.ones(3, 3), layer.weight]),
}


@pytest.mark.parametrize("name", ACTS)
def test_a_value_is_refused_by_name(name: str) -> None:
    layer = unread()
    with pytest.raises(ConfigError, match=r"lm\.weight.*Call fabric\.setup\(model\)"):
        ACTS[name](layer)


def test_torch_alone_would_go_on_without_a_word() -> None:
    layer = nn.Linear(3, 3, device="meta")
    for name in ("to nothing", "initialised", "copied into", "saved"):
        ACTS[name](layer)
    embedding = nn.Embedding(3, 3, device="meta")
    assert embedding(torch.ones(2, dtype=torch.long)).is_meta


def test_what_needs_no_value_works() -> None:
    layer = unread()
    weight = layer.weight
    layer.to(torch.float64)
    assert layer.weight is weight
    assert weight.dtype == torch.float64
    layer.requires_grad_(False)
    assert not weight.requires_grad
    assert weight.numel() == 9
    assert weight.is_meta
    assert "meta" in repr(weight)
    assert len(torch.optim.AdamW(layer.parameters()).param_groups[0]["params"]) == 2
    assert layer(torch.ones(2, 3, device="meta", dtype=torch.float64)).shape == (2, 3)


def test_adapters_that_follow_a_weight_keep_their_values() -> None:
    layer = unread()
    adapter = nn.Linear(3, 2).to(layer.weight.device)
    assert not adapter.weight.is_meta
    assert layer.weight.is_meta
    assert torch.zeros(2, device=layer.weight.data.device).tolist() == [0.0, 0.0]


def test_a_copy_is_unread_too() -> None:
    layer = unread()
    layer.twin = layer.weight
    copied = copy.deepcopy(layer)
    assert copied.twin is copied.weight
    assert copied.weight is not layer.weight
    with pytest.raises(ConfigError, match=r"lm\.weight"):
        copied(torch.ones(2, 3))


def test_guards_are_lifted_while_a_model_is_cut() -> None:
    layer = unread()
    with unguarded(layer.parameters()):
        assert type(layer.weight) is nn.Parameter
        layer.weight.data = layer.weight.data[:2].clone()
    assert type(layer.weight) is nn.Parameter
    layer = unread()
    with pytest.raises(ValueError, match="refused"), unguarded(layer.parameters()):
        raise ValueError("refused")
    assert type(layer.weight) is UnreadParameter


def test_the_attributes_of_others_are_kept() -> None:
    layer = unread()
    layer.weight.mark = 1  # type: ignore[attr-defined]
    assert forget_name(layer.weight) == {"mark": 1}
