"""Where each tensor of a model lies in the files of a checkpoint."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from goose_strategy.compat.weights import meta_model
from goose_strategy.hub.plan import attach, carried, detach, listed, make_plan
from goose_strategy.hub.source import SINGLE_FILE, HubFolder
from tests.hub.checkpoints import CONFIGS, keys_of, save


def test_a_tensor_of_the_same_name_is_read_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, "llama", shard="20KB")
    model = meta_model(CONFIGS["llama"](), dtype=torch.bfloat16)
    plan, keys = make_plan(model, HubFolder(tmp_path))
    assert {*plan.direct.values()} == keys_of(tmp_path)
    assert all(name == key for name, key in plan.direct.items())
    assert plan.conversions == keys.conversions == []
    assert {*plan.dtypes.values()} == {torch.bfloat16}
    assert plan.shapes["lm_head.weight"] == (97, 32)


def test_experts_are_made_of_many_tensors_layer_by_layer(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    model = meta_model(CONFIGS["mixtral"](), dtype=torch.float32)
    plan, _ = make_plan(model, HubFolder(tmp_path))
    made = {name: shape for one in plan.conversions for name, shape in one.makes.items()}
    assert made["model.layers.2.mlp.experts.gate_up_proj"] == (4, 96, 32)
    assert len(made) == 2 * 4
    gate = next(c for c in plan.conversions if "layers.2.mlp.experts.gate_up_proj" in c.first)
    assert len(gate.sources) == 2 * 4
    assert plan.names == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("stored_as", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_weight_is_found_under_either_name(tmp_path: Path, stored_as: str) -> None:
    save(tmp_path, "llama", tie_word_embeddings=True)
    tensors = load_file(tmp_path / SINGLE_FILE)
    assert "lm_head.weight" not in tensors
    tensors[stored_as] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / SINGLE_FILE)
    model = meta_model(CONFIGS["llama"](tie_word_embeddings=True), dtype=torch.float32)
    plan, _ = make_plan(model, HubFolder(tmp_path))
    assert plan.direct["model.embed_tokens.weight"] == stored_as
    assert plan.twins == {}


def test_both_names_of_a_tied_weight_are_compared_later(tmp_path: Path) -> None:
    save(tmp_path, "llama", tie_word_embeddings=False)
    model = meta_model(CONFIGS["llama"](tie_word_embeddings=True), dtype=torch.float32)
    plan, _ = make_plan(model, HubFolder(tmp_path))
    assert plan.twins == {"model.embed_tokens.weight": ["lm_head.weight"]}


def test_a_plan_goes_with_the_model_and_its_copies(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    model = meta_model(CONFIGS["llama"](), dtype=torch.float32)
    plan, _ = make_plan(model, HubFolder(tmp_path))
    attach(model, plan)
    copied = copy.deepcopy(model)
    ((_, _, other),) = carried(copied)
    assert other.parameters["lm_head.weight"] is copied.lm_head.weight
    assert other.parameters["lm_head.weight"] is not model.lm_head.weight
    detach(model)
    assert list(carried(model)) == []


def test_long_lists_are_cut() -> None:
    assert listed("ab") == "a, b"
    assert listed("abcdefghij") == "a, b, c, d, e, f, g, h and 2 more"
