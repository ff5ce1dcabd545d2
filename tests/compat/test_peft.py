"""Names of peft that goose-strategy uses. A failure here says what moved upstream."""

from __future__ import annotations

import sys
from typing import Any

import peft
import pytest
import torch
from torch import nn

from goose_strategy.compat import peft as compat
from tests.harness.models import tiny_model
from tests.parity.lora import LoraCase

ENDS = LoraCase(
    targets=("q_proj", "o_proj", "embed_tokens"),
    lora=(("modules_to_save", ("lm_head",)),),
)


@pytest.fixture(scope="module")
def model() -> Any:
    return ENDS.model()


def inside(model: nn.Module, name: str) -> Any:
    return model.get_submodule(f"base_model.model.{name}")


def test_without_peft_no_module_is_of_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("peft.tuners.lora.layer", "peft.utils.other", "peft.peft_model"):
        monkeypatch.delitem(sys.modules, name)
    layer = inside(model, "model.layers.0.self_attn.q_proj")
    assert not compat.is_lora(layer)
    assert compat.layers_under(layer) == {"": layer}
    assert list(compat.peft_models(model)) == []


def test_lora_layers_are_known_by_tuners_lora_layer(model: Any) -> None:
    layer, table = (
        inside(model, name) for name in ("model.layers.0.self_attn.q_proj", "model.embed_tokens")
    )
    assert compat.is_lora_linear(layer) and not compat.is_lora_linear(table)
    assert compat.is_lora_embedding(table) and not compat.is_lora_embedding(layer)
    assert compat.is_lora(layer) and compat.is_lora(table)
    assert not compat.is_lora(layer.base_layer)


def test_saved_copies_are_known_by_utils_other_modules_to_save_wrapper(model: Any) -> None:
    head = inside(model, "lm_head")
    assert compat.is_saved_copy(head)
    under = compat.layers_under(head)
    assert list(under) == ["original_module", "modules_to_save.default"]
    assert all(type(layer) is nn.Linear for layer in under.values())


def test_the_base_layer_of_an_adapter_is_called_base_layer(model: Any) -> None:
    layer = inside(model, "model.layers.0.self_attn.q_proj")
    assert compat.layers_under(layer) == {"base_layer": layer.base_layer}


def test_other_adapters_are_known_by_their_package() -> None:
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    other = peft.get_peft_model(tiny_model("llama", layers=1), config)
    assert compat.is_other_adapter(inside(other, "model.layers.0.self_attn.q_proj"))
    assert not compat.is_other_adapter(inside(ENDS.model(), "lm_head"))
    assert not compat.is_other_adapter(nn.Linear(1, 1))


def test_variants_are_in_lora_variant_and_merged_adapters_in_merged_adapters() -> None:
    dora = LoraCase(lora=(("use_dora", True),), targets=("q_proj",)).model()
    layer = inside(dora, "model.layers.0.self_attn.q_proj")
    assert "DoraLinearVariant" in (compat.obstacle_of(layer) or "")
    model: Any = ENDS.model()
    layer = inside(model, "model.layers.0.self_attn.q_proj")
    assert compat.obstacle_of(layer) is None
    model.merge_adapter()
    assert "unmerge_adapter" in (compat.obstacle_of(layer) or "")


def test_factors_are_in_lora_a_and_lora_b(model: Any) -> None:
    layer = inside(model, "model.layers.0.self_attn.q_proj")
    ((a, b),) = compat.linear_adapters(layer).values()
    assert a.weight.shape == (4, 32) and b.weight.shape == (32, 4)
    ((a, b),) = compat.embedding_adapters(inside(model, "model.embed_tokens")).values()
    assert a.shape == (4, 97) and b.shape == (32, 4)
    assert [type(one) for one in compat.adapter_dropouts(layer)] == [nn.Identity]


def test_an_embedding_looks_adapters_up_by_embed(model: Any) -> None:
    table = inside(model, "model.embed_tokens")
    seen = []

    def lookup(layer: Any, ids: Any, weight: Any) -> Any:
        seen.append((layer, tuple(weight.shape)))
        return weight[ids]

    plain: Any = type(table)
    table.__class__ = type("Replaced", (plain,), compat.replaced_lookup(lookup))
    try:
        table(torch.tensor([3]))
    finally:
        table.__class__ = plain
    assert seen == [(table, (97, 4))]


def test_delta_weight_is_what_merge_adds() -> None:
    model: Any = LoraCase(
        targets=("q_proj", "embed_tokens"),
        settings=(("attention_bias", True),),
    ).model()
    for name in ("model.layers.0.self_attn.q_proj", "model.embed_tokens"):
        layer = inside(model, name)
        before = layer.base_layer.weight.detach().clone()
        delta = compat.delta_weight(layer, "default")
        layer.merge()
        assert torch.equal(layer.base_layer.weight, before + delta)
        assert compat.delta_weight(layer, "absent") is None
        assert compat.delta_bias(layer, "default") is None


def test_delta_bias_is_what_merge_adds() -> None:
    settings = (("attention_bias", True),)
    case = LoraCase(targets=("q_proj",), settings=settings, lora=(("lora_bias", True),))
    layer = inside(case.model(), "model.layers.0.self_attn.q_proj")
    before, delta = layer.base_layer.bias.detach().clone(), compat.delta_bias(layer, "default")
    layer.merge()
    assert torch.equal(layer.base_layer.bias, before + delta)


def test_active_adapters_are_those_that_forward_adds() -> None:
    model: Any = LoraCase(adapters=("first", "second"), targets=("q_proj",)).model()
    layer = inside(model, "model.layers.0.self_attn.q_proj")
    assert compat.active_adapters(layer) == ["second"]
    with model.disable_adapter():
        assert compat.active_adapters(layer) == []


def test_peft_models_and_their_adapters_are_found(model: Any) -> None:
    assert list(compat.peft_models(nn.ModuleDict({"a": model}))) == [("a", model)]
    assert compat.adapter_names(model) == ["default"]


def peft_alone(model: nn.Module, state_dict: Any) -> Any:
    return peft.get_peft_model_state_dict(model, state_dict=state_dict, save_embedding_layers=False)


def test_adapter_state_has_the_names_that_from_pretrained_reads(model: Any, tmp_path: Any) -> None:
    state = compat.adapter_state(model, model.state_dict(), "default")
    expected = peft_alone(model, None)
    assert state.keys() == expected.keys()
    assert len(state) == 4 * 2 * 2 + 2 + 1
    # As on a pipeline stage, where the head's weight is not; peft alone would leave it out.
    whole = model.state_dict()
    head = inside(model, "lm_head").modules_to_save["default"]
    weight = head._parameters.pop("weight")
    assert len(peft_alone(model, whole)) == len(expected) - 1
    assert compat.adapter_state(model, whole, "default").keys() == expected.keys()
    head.weight = weight
    compat.save_adapter_config(model, "default", str(tmp_path))
    loaded = peft.PeftConfig.from_pretrained(str(tmp_path))
    assert loaded.inference_mode
    assert not model.peft_config["default"].inference_mode
