"""Layers that cost the same are of one kind, and no others."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from goose_strategy.pipeline_parallel.balance import Work
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.profile import Cost, Profile, layer_kinds
from tests.harness.models import FAMILIES, tiny_model


def kinds(model: nn.Module) -> list[int]:
    return layer_kinds(model, probe_model(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_a_tiny_model_are_of_one_kind(family: Any) -> None:
    assert kinds(tiny_model(family)) == [0, 0, 0, 0]


def test_what_a_layer_is_made_of_makes_its_kind() -> None:
    model = tiny_model("llama", layers=6)
    layers = model.model.layers
    layers[1].mlp.up_proj = nn.Linear(32, 48, bias=True).double()
    layers[2].mlp.act_fn = nn.ReLU()
    layers[3].self_attn.q_proj.weight.requires_grad_(False)
    layers[4].self_attn.scaling = 0.5
    assert kinds(model) == [0, 1, 2, 3, 4, 0]


def test_layers_that_look_at_a_part_of_the_text_are_a_kind_of_their_own() -> None:
    model = tiny_model(
        "qwen2",
        layers=4,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=2,
    )
    assert [layer.self_attn.sliding_window for layer in model.model.layers] == [None, None, 4, 4]
    assert kinds(model) == [0, 0, 2, 2]


def test_a_number_that_counts_the_layers_tells_nothing() -> None:
    model = tiny_model("llama")
    for index, layer in enumerate(model.model.layers):
        layer.position = index
    assert kinds(model) == [0, 0, 0, 0]
    model.model.layers[3].position = 0
    assert kinds(model) == [0, 1, 2, 0]


def test_figures_by_part() -> None:
    layer = Cost(1, 2, 3, 4)
    assert layer.time == 6
    profile = Profile((1, 8), Cost(10), (layer, layer), Cost(20, 30, 40, 50))
    assert profile.work() == Work(10, (6, 6), 90)
    assert profile.part("saved") == Work(0, (4, 4), 50)
