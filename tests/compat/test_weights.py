"""What breaks when transformers moves its loading code: each test names the user of one thing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from goose_strategy.compat.weights import (
    Conversion,
    compute_buffers,
    kept_in_fp32,
    map_keys,
    meta_model,
    parts_of,
    recall_transforms,
    remember_transforms,
    revert_names,
    transform_names,
    without_ignored,
)
from goose_strategy.errors import PlanError
from tests.hub.checkpoints import CONFIGS, hub_model, refused, save

CPU = torch.device("cpu")


def test_a_model_is_built_on_the_meta_device_with_its_ties() -> None:
    model = meta_model(CONFIGS["llama"](tie_word_embeddings=True), dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_modules_that_stay_in_fp32_are_known() -> None:
    model = meta_model(CONFIGS["llama"](), dtype=torch.bfloat16)
    assert kept_in_fp32(model, torch.bfloat16) == []
    model._keep_in_fp32_modules_strict = {"layers.1.mlp", "norm"}
    kept = kept_in_fp32(model, torch.bfloat16)
    assert "model.norm.weight" in kept
    assert "model.layers.1.mlp.up_proj.weight" in kept
    assert "model.layers.0.mlp.up_proj.weight" not in kept


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mixtral"])
def test_keys_are_mapped_to_names_and_back(tmp_path: Path, family: str) -> None:
    """The loader and the export: conversions give what transformers' own loading gives."""
    model = hub_model(family)
    save(tmp_path, family)
    stored = load_file(tmp_path / "model.safetensors")
    blank = meta_model(CONFIGS[family](), dtype=torch.float32)
    keys = map_keys(blank, {key: tuple(tensor.shape) for key, tensor in stored.items()})
    assert keys.unexpected == []
    loaded = {name: stored[key] for name, key in keys.direct.items()}
    for conversion in keys.conversions:
        made = conversion.convert(blank, stored.__getitem__)
        assert {name: tuple(tensor.shape) for name, tensor in made.items()} == conversion.makes
        loaded |= made
    assert loaded.keys() == dict(model.named_parameters()).keys()
    for name, param in model.named_parameters():
        assert torch.equal(loaded[name], param)
    reverted = revert_names(blank, loaded)
    assert reverted.keys() == stored.keys()
    assert all(torch.equal(reverted[key], stored[key]) for key in stored)


def placed(conversion: Conversion, stored: dict[str, Tensor]) -> Tensor:
    """Put the sources where `parts_of` says they lie."""
    shapes = {key: tuple(tensor.shape) for key, tensor in stored.items()}
    parts = parts_of(conversion, shapes)
    assert parts is not None
    ((_, shape),) = conversion.makes.items()
    whole = torch.full(shape, torch.nan)
    for key, offsets, stacked in parts:
        part = stored[key].unsqueeze(0) if stacked else stored[key]
        blocks = zip(offsets, part.shape, strict=True)
        whole[tuple(slice(at, at + n) for at, n in blocks)] = part
    return whole


def test_experts_lie_where_transformers_puts_them(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    stored = load_file(tmp_path / "model.safetensors")
    blank = meta_model(CONFIGS["mixtral"](), dtype=torch.float32)
    keys = map_keys(blank, {key: tuple(tensor.shape) for key, tensor in stored.items()})
    assert len(keys.conversions) == 8
    for conversion in keys.conversions:
        (made,) = conversion.convert(blank, stored.__getitem__).values()
        assert torch.equal(placed(conversion, stored), made)


@pytest.mark.parametrize("dim", [0, 1])
def test_joined_matrices_lie_one_behind_the_other(dim: int) -> None:
    blank = meta_model(CONFIGS["llama"](), dtype=torch.float32)
    stored = {"l.a.weight": torch.randn(4, 4), "l.b.weight": torch.randn(4, 4)}
    converter = WeightConverter(["b.weight", "a.weight"], "ab.weight", [Concatenate(dim=dim)])
    sources = [("l.a.weight", "a.weight"), ("l.b.weight", "b.weight")]
    conversion = Conversion("l.ab.weight", sources, converter=converter)
    ((name, made),) = conversion.convert(blank, stored.__getitem__).items()
    conversion.makes = {name: tuple(made.shape)}
    assert torch.equal(placed(conversion, stored), made)


def test_other_conversions_are_left_to_transformers() -> None:
    for operations in ([Transpose()], [MergeModulelist(dim=1)], [Chunk()]):
        converter = WeightConverter("a.*.weight", "b.weight", operations)
        conversion = Conversion(
            "l.b.weight", [("l.a.0.weight", "a.*.weight")], {"l.b.weight": (4, 4)}
        )
        conversion.converter = converter
        assert parts_of(conversion, {"l.a.0.weight": (4, 4)}) is None


def test_a_conversion_that_fails_names_its_tensors(tmp_path: Path) -> None:
    save(tmp_path, "mixtral")
    stored = load_file(tmp_path / "model.safetensors")
    shapes = {key: tuple(tensor.shape) for key, tensor in stored.items()}
    shapes["model.layers.0.block_sparse_moe.experts.1.w1.weight"] = (7, 7)
    with refused(PlanError, "layers.0", "8 tensors", "conversion"):
        map_keys(meta_model(CONFIGS["mixtral"](), dtype=torch.float32), shapes)


def test_transforms_are_noted_as_text_and_found_again() -> None:
    model = meta_model(CONFIGS["mixtral"](), dtype=torch.float32)
    assert transform_names(model) is None
    keys = map_keys(model, {"model.layers.0.block_sparse_moe.gate.weight": (4, 32)})
    assert keys.direct == {
        "model.layers.0.mlp.gate.weight": "model.layers.0.block_sparse_moe.gate.weight"
    }
    remember_transforms(model, keys.used)
    noted = transform_names(model)
    assert noted
    other = meta_model(CONFIGS["mixtral"](), dtype=torch.float32)
    recall_transforms(other, noted)
    assert transform_names(other) == noted
    recall_transforms(other, None)
    assert transform_names(other) == noted
    with refused(PlanError, "does not know the conversion Unknown"):
        recall_transforms(other, ["Unknown(a -> b)"])


def test_what_transformers_does_not_mention_is_left_out() -> None:
    model = meta_model(CONFIGS["llama"](), dtype=torch.float32)
    missing, unexpected = without_ignored(
        model, ["lm_head.weight"], ["model.layers.0.self_attn.rotary_emb.inv_freq", "other"]
    )
    assert missing == ["lm_head.weight"]
    assert unexpected == ["other"]


def test_rotary_frequencies_are_computed_in_fp32() -> None:
    config = CONFIGS["llama"](
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    )
    model = meta_model(config, dtype=torch.bfloat16)
    names = [name for name, _ in model.named_buffers()]
    compute_buffers(model, names, CPU)
    expected = dict(hub_model("llama", rope_parameters=config.rope_parameters).named_buffers())
    for name, buffer in model.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, expected[name])
    assert all(p.is_meta for p in model.parameters())


def test_a_buffer_that_is_not_computed_is_refused() -> None:
    model = meta_model(CONFIGS["llama"](), dtype=torch.float32)
    mask = torch.ones(3, dtype=torch.bool, device="meta")
    model.model.norm.register_buffer("mask", mask, persistent=False)
    with refused(PlanError, "model.norm.mask", "LlamaModel does not compute it"):
        compute_buffers(model, ["model.norm.mask"], CPU)


def test_a_plain_attribute_that_is_the_buffer_follows_it() -> None:
    model = meta_model(CONFIGS["llama"](), dtype=torch.float32)
    rotary: nn.Module = model.model.rotary_emb
    vars(rotary)["kept"] = rotary.inv_freq
    compute_buffers(model, ["model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"], CPU)
    assert rotary.kept is rotary.inv_freq
