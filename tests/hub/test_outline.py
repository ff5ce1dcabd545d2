"""What an export will hold is known before a value is there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from goose_strategy.compat.weights import meta_model
from goose_strategy.errors import PlanError
from goose_strategy.hub import outline
from goose_strategy.hub.outline import Shape, make_outline
from tests.hub.checkpoints import CONFIGS, hub_model, refused


def shapes_of(model: Any) -> dict[str, Shape]:
    return {name: Shape(p.dtype, tuple(p.shape)) for name, p in model.named_parameters()}


def blank(family: str, **settings: Any) -> Any:
    return meta_model(CONFIGS[family](**settings), dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_keys_are_those_of_transformers(family: str, tmp_path: Any) -> None:
    model = hub_model(family)
    units = make_outline(blank(family), shapes_of(model), torch.bfloat16)
    found = {key: kind for unit in units for key, kind in unit.keys.items()}
    model.bfloat16().save_pretrained(tmp_path)
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model.safetensors")
    assert found == {k: Shape(t.dtype, tuple(t.shape)) for k, t in stored.items()}


def test_a_layer_is_one_unit() -> None:
    units = make_outline(blank("mixtral"), shapes_of(hub_model("mixtral")), None)
    layer = next(unit for unit in units if "model.layers.2.mlp.gate.weight" in unit.names)
    assert all(name.startswith("model.layers.2.") for name in layer.names)
    assert "model.layers.2.block_sparse_moe.experts.3.w1.weight" in layer.keys
    assert ("lm_head.weight",) in [unit.names for unit in units]
    assert len(units) == 4 + 3


def test_what_the_config_does_not_describe_is_refused() -> None:
    shapes = shapes_of(hub_model("llama"))
    extra = {**shapes, "model.layers.0.lora_A": Shape(torch.float32, (2, 2))}
    with refused(PlanError, "lora_A", "merge adapters"):
        make_outline(blank("llama"), extra, None)
    fewer = {name: shape for name, shape in shapes.items() if name != "model.norm.weight"}
    with refused(PlanError, "1 tensors", "model.norm.weight", "not there"):
        make_outline(blank("llama"), fewer, None)
    other = {**shapes, "lm_head.weight": Shape(torch.float32, (98, 32))}
    with refused(PlanError, "shape=(98, 32), by the config (97, 32)"):
        make_outline(blank("llama"), other, None)


def test_a_tie_of_the_config_need_not_be_there_twice() -> None:
    shapes = shapes_of(hub_model("llama", tie_word_embeddings=True))
    assert "lm_head.weight" not in shapes
    units = make_outline(blank("llama", tie_word_embeddings=True), shapes, None)
    assert "lm_head.weight" not in {key for unit in units for key in unit.keys}
    with refused(PlanError, "lm_head.weight"):
        make_outline(blank("llama", tie_word_embeddings=False), shapes, None)


def test_a_conversion_over_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def over_layers(_model: Any, tensors: Any) -> dict[str, Any]:
        return {f"{len(tensors)}.{name}": tensor for name, tensor in tensors.items()}

    monkeypatch.setattr(outline, "revert_names", over_layers)
    with refused(PlanError, "layer by layer", "save_pretrained"):
        make_outline(blank("llama"), shapes_of(hub_model("llama")), None)
