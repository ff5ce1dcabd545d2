"""What is tried for a block, and in which order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from goose_strategy.models.candidates import Way, ways_of
from goose_strategy.models.roles import Block, find_blocks
from goose_strategy.tensor_parallel.plan import Style
from tests.harness.models import tiny_model
from tests.harness.zoo import zoo_model


def _ways(model: Any, tp: int = 2) -> dict[str, list[Way]]:
    ids = torch.arange(3, 19).view(2, 8)
    blocks = find_blocks(model.eval(), lambda: model(input_ids=ids, use_cache=False).logits)
    return {block.name.rpartition(".")[2]: ways_of(block, model, tp) for block in blocks}


def test_fused_matrices_are_tried_with_seams_first() -> None:
    ways = _ways(tiny_model("gpt2", layers=1))
    fused = "transformer.h.*.attn.c_attn"
    assert ways["attn"][0].packed == {fused: (4, 4, 4)}
    assert {} in [way.packed for way in ways["attn"]]
    # What its methods read (not its ``num_heads``): the width of a third of the fused matrix.
    assert ways["attn"][0].counts == {"transformer.h.*.attn": ("split_size",)}
    assert ways["attn"][0].rules[fused] is Style.COLUMN
    phi = _ways(tiny_model("phi3", layers=1))
    assert phi["self_attn"][0].packed == {"model.layers.*.self_attn.qkv_proj": (4, 2, 2)}
    # Twice its width may be gate and up, or queries and half as many keys and values.
    tried = [way.packed.get("model.layers.*.mlp.gate_up_proj", ()) for way in phi["mlp"]]
    assert tried[:3] == [(4, 2, 2), (1, 1), ()]


def test_the_last_way_leaves_a_block_whole_and_the_one_before_gathers() -> None:
    for ways in _ways(tiny_model("qwen3", layers=1)).values():
        assert ways[-1] == Way()
        assert ways[-2].gathers
        assert set(ways[-2].rules.values()) == {Style.GATHERED, Style.SPLIT}
        assert not any(way.gathers for way in ways[:-2])


def test_what_lies_between_is_guessed_or_cut_with_the_heads() -> None:
    (ways,) = [ways for name, ways in _ways(zoo_model("GptOssForCausalLM")).items()]
    assert ways[0].rules["model.layers.*.self_attn.sinks"] is Style.COLUMN
    norms = {f"model.layers.*.self_attn.{name}_norm.weight" for name in "qk"}
    ways = _ways(tiny_model("qwen3", layers=1))["self_attn"]
    assert ways[0].guessed == norms
    assert {ways[0].rules[name] for name in norms} == {Style.PARTIAL}


def test_what_tp_does_not_divide_or_two_layers_read_is_gathered_at_most() -> None:
    (ways,) = [
        way for name, way in _ways(tiny_model("llama", layers=1), 3).items() if name == "mlp"
    ]
    assert not ways[0].gathers
    attention = _ways(tiny_model("llama", layers=1), 3)["self_attn"]
    assert attention == [Way()]
    assert _ways(zoo_model("MiniCPM3ForCausalLM"))["self_attn"][0].gathers
    block = Block({"down": 6}, {"up": 6})
    model = nn.ModuleDict({"down": nn.Linear(6, 2), "up": nn.Linear(2, 6)})
    assert [way.gathers for way in ways_of(block, model, 4)] == [False]
