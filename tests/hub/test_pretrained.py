"""The model of a checkpoint before anything was read: names, types, refusals."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig
from transformers.models.auto import AutoModelForCausalLM

import goose_strategy
from goose_strategy.errors import CheckpointError, ConfigError
from goose_strategy.hub.plan import carried
from goose_strategy.hub.pretrained import from_pretrained
from goose_strategy.hub.source import SINGLE_FILE, HubReader
from tests.hub.checkpoints import hub_model, keys_of, refused, save


def test_the_package_offers_it() -> None:
    assert goose_strategy.from_pretrained is from_pretrained


def test_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "llama")
    monkeypatch.setattr(HubReader, "fill", lambda *_, **__: pytest.fail("a weight was read"))
    before = torch.get_rng_state()
    model = from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert not model.training
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight.*fabric\.setup"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_names_types_and_settings_are_those_of_transformers(tmp_path: Path) -> None:
    save(tmp_path, "llama", dtype=torch.bfloat16, tie_word_embeddings=True)
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    ours = from_pretrained(tmp_path)
    shown = [(n, p.shape, p.dtype, p.requires_grad) for n, p in theirs.named_parameters()]
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in ours.named_parameters()] == shown
    buffers = [(n, b.shape, b.dtype) for n, b in theirs.named_buffers()]
    assert [(n, b.shape, b.dtype) for n, b in ours.named_buffers()] == buffers
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    assert ours.generation_config.temperature == 0.25
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.name_or_path == str(tmp_path)


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        (None, torch.bfloat16),
        ("auto", torch.bfloat16),
        (torch.float64, torch.float64),
        ("float16", torch.float16),
    ],
)
def test_the_type_is_the_stored_one_or_the_one_asked_for(
    tmp_path: Path, asked: torch.dtype | str | None, dtype: torch.dtype
) -> None:
    save(tmp_path, "llama", dtype=torch.bfloat16)
    model = from_pretrained(tmp_path, dtype=asked)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {b.dtype for b in model.buffers()} == {torch.float32}
    # Without a word in the config, the files decide.
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert {p.dtype for p in from_pretrained(tmp_path, dtype=asked).parameters()} == {dtype}


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with refused(ConfigError, "dtype='int8'"):
        from_pretrained(tmp_path, dtype="int8")
    with refused(ConfigError, "num_latchkeys=3", "LlamaConfig has no such setting"):
        from_pretrained(tmp_path, num_latchkeys=3)
    with refused(ConfigError, "is no folder"):
        from_pretrained(tmp_path / "absent")
    model = from_pretrained(tmp_path, attention_dropout=0.5, attn_implementation="eager")
    assert model.config.attention_dropout == 0.5
    assert model.config._attn_implementation == "eager"
    config = json.loads((tmp_path / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    with refused(ConfigError, "quantised"):
        from_pretrained(tmp_path)
    elsewhere = {**config, "transformers_weights": "other.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(elsewhere))
    with refused(ConfigError, "transformers_weights='other.safetensors'"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with refused(ConfigError, "holds no config.json"):
        from_pretrained(tmp_path)


def test_a_missing_tensor_is_refused_where_transformers_draws_one_at_random(
    tmp_path: Path,
) -> None:
    save(tmp_path, "llama")
    tensors = load_file(tmp_path / SINGLE_FILE)
    for key in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        del tensors[key]
    save_file(tensors, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    with refused(CheckpointError, "2 of the 39", "layers.1.mlp.up_proj", "tie_word_embeddings"):
        from_pretrained(tmp_path)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    with refused(CheckpointError, "another config", "shape=(48, 32) in the files"):
        from_pretrained(tmp_path, intermediate_size=40)


def test_unexpected_tensors_are_one_warning(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    tensors = load_file(tmp_path / SINGLE_FILE)
    tensors["model.extra.weight"] = torch.ones(2)
    # Computed nowadays; transformers does not mention it either.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match="holds 1 tensors that.*model.extra.weight"):
        from_pretrained(tmp_path)


def test_keys_may_lack_the_prefix_of_the_model(tmp_path: Path) -> None:
    """Files of gpt2 and bloom on the hub have no ``transformer.``, and gpt2's have old masks."""
    model = hub_model("gpt2")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(bare, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = from_pretrained(tmp_path)
    ((_, _, plan),) = carried(loaded)
    assert plan.direct["transformer.h.0.attn.c_attn.weight"] == "h.0.attn.c_attn.weight"
    assert plan.names == {name for name, _ in model.named_parameters()}


def test_it_may_be_frozen_copied_and_given_to_an_optimizer(tmp_path: Path) -> None:
    model = from_pretrained(save(tmp_path, "llama"))
    model.model.embed_tokens.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    assert len(optimizer.param_groups[0]["params"]) == len(keys_of(tmp_path)) - 1
    holder = nn.ModuleDict({"lm": model})
    assert [name for name, _, _ in carried(holder)] == ["lm"]
