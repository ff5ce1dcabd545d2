"""A model that was not read runs, in almost no memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from goose_strategy.hub.pretrained import from_pretrained
from goose_strategy.hub.twin import runnable_twin, solid_copy
from goose_strategy.pipeline_parallel.probe import probe_model
from tests.hub.checkpoints import hub_model, save

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "opt", "mixtral"])
def test_a_probe_finds_the_same_as_on_the_model_itself(tmp_path: Path, family: str) -> None:
    save(tmp_path, family)
    unread = from_pretrained(tmp_path)
    found = probe_model(runnable_twin(unread, CPU))
    expected = probe_model(hub_model(family))
    assert found.stack == expected.stack
    assert found.segments == expected.segments
    assert [call.name for call in found.layers] == [call.name for call in expected.layers]
    for boundary in range(1, 4):
        assert found.cut(boundary) == expected.cut(boundary)
        for layer in range(boundary, 4):
            places = found.injections(boundary, layer)
            assert places == expected.injections(boundary, layer)
        assert found.reached(0, boundary) == expected.reached(0, boundary)
        assert found.reached(boundary, 4) == expected.reached(boundary, 4)


def test_a_twin_costs_no_memory_and_leaves_the_model_alone(tmp_path: Path) -> None:
    save(tmp_path, "llama", tie_word_embeddings=True)
    model = from_pretrained(tmp_path)
    twin = runnable_twin(model, CPU)
    assert all(p.untyped_storage().nbytes() == 4 for p in twin.parameters())
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    inv_freq = hub_model("llama").model.rotary_emb.inv_freq
    assert torch.equal(twin.model.rotary_emb.inv_freq, inv_freq)
    assert all(p.is_meta for p in model.parameters())
    assert all(b.is_meta for b in model.buffers())


def test_a_linear_layer_computes_what_its_constants_say(tmp_path: Path) -> None:
    twin = runnable_twin(from_pretrained(save(tmp_path, "llama", attention_bias=True)), CPU)
    layer = twin.model.layers[1].self_attn.q_proj
    assert "forward" in vars(layer)
    x = torch.randn(2, 3, 32)
    expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None


def test_tensors_that_have_values_keep_them(tmp_path: Path) -> None:
    model = from_pretrained(save(tmp_path, "llama"))
    model.lm_head.weight = torch.nn.Parameter(torch.randn(97, 32))
    assert torch.equal(runnable_twin(model, CPU).lm_head.weight, model.lm_head.weight)


def test_a_part_of_a_twin_can_be_had_with_memory(tmp_path: Path) -> None:
    twin = runnable_twin(from_pretrained(save(tmp_path, "llama")), CPU)
    layer = solid_copy(twin.model.layers[1], {})
    mine, theirs = layer.self_attn.q_proj, twin.model.layers[1].self_attn.q_proj
    assert mine.weight.untyped_storage().nbytes() == mine.weight.numel() * 4
    assert mine.weight.std() > 0
    x = torch.randn(2, mine.in_features)
    assert torch.equal(mine(x), x @ mine.weight.T)
    assert theirs.weight.untyped_storage().nbytes() == 4
    assert "forward" in vars(theirs)
