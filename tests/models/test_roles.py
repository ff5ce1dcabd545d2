"""Pairs of linear layers are found by what feeds what, under any names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from goose_strategy.models.roles import Block, features, find_blocks, is_linear
from tests.harness.models import tiny_model
from tests.harness.zoo import zoo_model


def _blocks(model: Any) -> dict[str, Block]:
    ids = torch.arange(3, 19).view(2, 8)
    found = find_blocks(model.eval(), lambda: model(input_ids=ids, use_cache=False).logits)
    return {block.name: block for block in found}


def test_attention_and_mlp_of_a_plain_decoder() -> None:
    found = _blocks(tiny_model("qwen3", layers=2))
    attention, mlp = "model.layers.*.self_attn", "model.layers.*.mlp"
    assert found.keys() == {attention, mlp}
    assert found[attention].layers == {f"{attention}.{name}_proj" for name in "qkvo"}
    assert found[attention].rows == {f"{attention}.o_proj": 32}
    assert found[attention].between.keys() == {f"{attention}.{name}_norm.weight" for name in "qk"}
    assert found[mlp].columns == {f"{mlp}.gate_proj": 48, f"{mlp}.up_proj": 48}
    assert not found[attention].shared


def test_layers_in_modules_of_their_own_and_behind_norms() -> None:
    layer = "bert.encoder.layer.*"
    found = _blocks(zoo_model("BertLMHeadModel"))
    assert found[f"{layer}.attention"].rows == {f"{layer}.attention.output.dense": 64}
    assert len(found[f"{layer}.attention"].columns) == 3
    assert found[layer].columns == {f"{layer}.intermediate.dense": 128}
    assert found[layer].rows == {f"{layer}.output.dense": 128}


def test_transposed_layers() -> None:
    model: Any = tiny_model("gpt2", layers=1)
    found = _blocks(model)
    assert found["transformer.h.*.attn"].columns == {"transformer.h.*.attn.c_attn": 96}
    assert features(model.transformer.h[0].attn.c_attn) == (32, 96)
    assert is_linear(model.transformer.h[0].attn.c_attn)
    assert not is_linear(model.transformer.wte)


def test_what_two_layers_read_is_shared() -> None:
    """The latent keys are read by the layer that widens them, and their rotary part directly."""
    attention = "model.layers.*.self_attn"
    found = _blocks(zoo_model("MiniCPM3ForCausalLM"))[attention]
    assert found.shared == {f"{attention}.kv_a_proj_with_mqa"}


class _Cell(nn.Module):
    """Writes in place, chooses by a router, and gives its result in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.router = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        wide = self.up(x)
        wide += 1.0
        return (x + torch.sigmoid(self.router(x)) * self.down(wide.relu_()),)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cells = nn.Embedding(9, 4), nn.ModuleList([_Cell(), _Cell()])
        self.head = nn.Linear(4, 9)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for cell in self.cells:
            (x,) = cell(x)
        out: Tensor = self.head(x)
        return out


def test_routers_and_heads_are_no_rows() -> None:
    model = _Model()
    ids = torch.arange(8).view(2, 4)
    before = model(ids)
    (block,) = find_blocks(model, lambda: model(ids))
    assert (block.name, block.rows, block.columns) == (
        "cells.*",
        {"cells.*.down": 8},
        {"cells.*.up": 8},
    )
    # Nothing of the watching is left, and watching changed no value.
    torch.testing.assert_close(model(ids), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
