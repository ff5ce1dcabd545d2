"""Rows that depend on the longest of their batch are refused, unless batches have one length."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import PrivacyError
from goose_strategy.privacy.lengths import OneLength, rope_by_length
from tests.harness.models import IGNORED, Batch, batches, tiny_model
from tests.harness.world import RankFailure
from tests.privacy.oracle import PrivateCase, run_call

DYNAMIC = {
    "rope_type": "dynamic",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}


def rows(length: int, *, left: int = 0) -> Batch:
    ids = torch.ones(2, length, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, :left] = 0
    return {"input_ids": ids, "attention_mask": mask}


def lengths(parameters: Any = None, *, positions: bool = False) -> OneLength:
    model = nn.Module()
    model.config = SimpleNamespace(rope_parameters=parameters)  # type: ignore[assignment]
    return OneLength(model, positions=positions)


@pytest.mark.parametrize(
    ("parameters", "found"),
    [
        (None, None),
        ({"rope_type": "default"}, None),
        ({"rope_type": "longrope"}, "longrope"),
        (
            {"full_attention": {"rope_type": "dynamic"}, "sliding": {"rope_type": "default"}},
            "dynamic",
        ),
    ],
)
def test_the_kind_of_a_rotary_embedding(parameters: Any, found: str | None) -> None:
    assert rope_by_length(SimpleNamespace(rope_parameters=parameters)) == found
    assert rope_by_length(SimpleNamespace()) is None


def test_one_length_is_asked_for_where_rows_depend_on_it() -> None:
    plain = lengths()
    for length in (4, 6):
        plain.check([rows(length, left=1)], [rows(length)])
    rope = lengths(DYNAMIC)
    rope.check([rows(6)], [rows(6), rows(6)])
    with pytest.raises(PrivacyError, match=r"rope_type='dynamic'.*length 5, one before had 6"):
        rope.check([rows(6)], [rows(6), rows(5)])


def test_padding_on_the_left_moves_positions() -> None:
    table = lengths(positions=True)
    table.check([rows(6)], [rows(6)])
    table.check([rows(4)], [rows(4)])
    table.check([rows(6, left=2)], [rows(6, left=2)])
    told = {**rows(5, left=1), "position_ids": torch.arange(5).expand(2, 5)}
    table.check([told], [told])
    with pytest.raises(PrivacyError, match="positions count the padding on the left"):
        table.check([rows(5, left=1)], [rows(5, left=1)])


def test_a_longer_row_moves_the_gradients_of_the_others() -> None:
    """What it is for: the same row, once padded to its own length, once to another row's."""
    model = tiny_model("llama", rope_parameters=dict(DYNAMIC), max_position_embeddings=8)
    batch = batches(1, batch_size=1, seq_len=10, padded=False)[0]
    longer = {
        "input_ids": torch.cat([batch["input_ids"], torch.zeros(1, 6, dtype=torch.long)], 1),
        "labels": torch.cat([batch["labels"], torch.full((1, 6), IGNORED)], 1),
        "attention_mask": (torch.arange(16) < 10).long()[None],
    }

    def gradient(inputs: Batch) -> Tensor:
        loss = model(**inputs).loss
        (found,) = torch.autograd.grad(loss, [model.model.layers[0].self_attn.q_proj.weight])
        return found

    alone, beside = gradient(batch), gradient(longer)
    assert float((alone - beside).norm() / alone.norm()) > 1e-3


def test_a_run_with_batches_of_two_lengths_is_refused() -> None:
    settings = (("rope_parameters", DYNAMIC), ("max_position_embeddings", 8))
    case = replace(
        PrivateCase(microbatches=2, settings=settings), pipeline=(("trim_padding", True),)
    )
    batch = batches(1, batch_size=4, padded=False)[0]
    run_call(case, batch)
    mask = torch.ones_like(batch["input_ids"])
    mask[2:, 7:] = 0
    batch["labels"][2:, 7:] = IGNORED
    with pytest.raises(RankFailure, match="pad all rows to one length"):
        run_call(case, {**batch, "attention_mask": mask})
