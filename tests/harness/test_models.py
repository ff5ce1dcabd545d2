"""The tiny models: awkward on purpose, and the same everywhere."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.harness.models import FAMILIES, IGNORED, Family, batches, rows_of, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_random_and_repeatable(family: Family, tied: bool) -> None:
    model, again = tiny_model(family, tied=tied), tiny_model(family, tied=tied)
    assert ("lm_head.weight" in dict(model.named_parameters())) is not tied
    for (name, param), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert param.dtype == torch.float64
        assert param.std() > 0.01, name
        assert torch.equal(param, other), name
    other_seed = tiny_model(family, tied=tied, seed=1)
    pairs = zip(other_seed.parameters(), model.parameters(), strict=True)
    assert not any(torch.equal(one, other) for one, other in pairs)


def test_all_dtypes_start_alike_and_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    wide, narrow = tiny_model("llama"), tiny_model("llama", dtype=torch.float32)
    assert torch.equal(before, torch.get_rng_state())
    for param, other in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(param.float(), other)


def test_families_differ_where_they_should() -> None:
    assert any("q_proj.bias" in name for name, _ in tiny_model("qwen2").named_parameters())
    assert any("q_norm" in name for name, _ in tiny_model("qwen3").named_parameters())
    biased = tiny_model("llama", attention_bias=True, mlp_bias=True)
    assert any("down_proj.bias" in name for name, _ in biased.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_stays_fp64(family: Family) -> None:
    model = tiny_model(family).eval()
    # A change far below fp32's resolution must arrive at the logits.
    moved = copy.deepcopy(model)
    with torch.no_grad():
        moved.get_input_embeddings().weight.mul_(1 + 1e-13)
        ids = batches(1)[0]["input_ids"]
        change = (moved(input_ids=ids).logits - model(input_ids=ids).logits).abs().max()
    assert 0 < change < 1e-11


def test_batches_are_uneven() -> None:
    first, second = batches(2, batch_size=6, seq_len=10)
    assert not torch.equal(first["input_ids"], second["input_ids"])
    valid = (first["labels"] != IGNORED).sum(dim=1)
    assert valid.min() >= 1
    assert len(valid.unique()) > 2
    assert first["attention_mask"][0].all()
    assert not first["attention_mask"].all()
    assert (first["input_ids"][first["attention_mask"] == 0] == 0).all()
    assert "attention_mask" not in batches(1, padded=False)[0]


def test_rows_partition_the_batch() -> None:
    batch = batches(1, batch_size=6)[0]
    pieces = [rows_of(batch, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([piece["labels"] for piece in pieces]), batch["labels"])
