"""What is found is the same on all ranks, and what it costs is told."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import transformers
from torch import nn

from goose_strategy.models.deduce import LOGGER, deduce_plan
from goose_strategy.models.trial import Trial
from goose_strategy.tensor_parallel.config import TensorConfig
from goose_strategy.tensor_parallel.plan import Style
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.harness.zoo import zoo_model
from tests.tensor_parallel.helpers import with_mesh

ODD = "BertLMHeadModel of three heads"


def _odd() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=3, is_decoder=True,
    )  # fmt: skip
    return transformers.BertLMHeadModel(config)


@with_mesh
def _deduced(_ctx: Context, mesh: Any, name: str) -> tuple[Any, list[tuple[int, str]]]:
    lines: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    before = LOGGER.level
    LOGGER.setLevel(logging.INFO)
    try:
        model = zoo_model(name) if name != ODD else _odd()
        return deduce_plan(model, TensorConfig(gather_logits=True), Trial(model, mesh)), lines
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)


def _found(name: str) -> Any:
    results = run_ranks(_deduced, 2, name)
    (found, lines), *others = results
    assert all(other == found for other, _ in others)
    assert [said for _, said in others] == [[]] * len(others)
    ((level, text),) = lines
    assert text == found.describe(name.split()[0])
    quiet = not found.gathered and not found.whole
    assert level == (logging.INFO if quiet else logging.WARNING)
    return found


def test_all_of_a_plain_model_is_cut() -> None:
    found = _found("BertLMHeadModel")
    layer = "bert.encoder.layer.*"
    assert found.cut == (f"{layer}.attention", layer, "the vocabulary")
    assert found.plan.rules == {
        **{f"{layer}.attention.self.{name}": Style.COLUMN for name in ("query", "key", "value")},
        f"{layer}.attention.output.dense": Style.ROW,
        f"{layer}.intermediate.dense": Style.COLUMN,
        f"{layer}.output.dense": Style.ROW,
        "bert.embeddings.word_embeddings": Style.VOCAB,
        "cls.predictions.decoder": Style.HEAD,
        "cls.predictions.bias": Style.COLUMN,
    }
    assert found.plan.gather_logits
    # Positions, norms and the layer in front of the head.
    assert 0.05 < found.replicated < 0.15


def test_what_cannot_be_cut_is_gathered_and_told() -> None:
    found = _found("MambaForCausalLM")
    mixer = "backbone.layers.*.mixer"
    assert (found.cut, found.gathered[0]) == (("the vocabulary",), mixer)
    assert found.plan.rules[f"{mixer}.in_proj"] is Style.GATHERED
    assert f"on every tp rank: {mixer}" in found.describe("it")
    assert f"{found.replicated:.1%} of the parameters" in found.describe("it")


def test_heads_that_tp_does_not_divide_are_gathered_where_the_width_allows() -> None:
    """Two ranks share three heads: the MLP is cut, and the weights of attention are."""
    found = _found(ODD)
    assert found.gathered == ("bert.encoder.layer.*.attention",)
    assert "bert.encoder.layer.*" in found.cut


@pytest.mark.parametrize("name", ["GPTNeoForCausalLM"])
def test_layers_without_biases_and_with_a_list_in_their_config(name: str) -> None:
    """Global and local attention alternate, so that two layers are needed to see both."""
    found = _found(name)
    assert "transformer.h.*.attn.attention" in found.cut
