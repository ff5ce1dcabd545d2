"""What an export has to know survives as plain values."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import LlamaForSequenceClassification

from goose_strategy.compat.weights import transform_names
from goose_strategy.errors import PlanError
from goose_strategy.hub.pretrained import from_pretrained
from goose_strategy.runtime.origin import Origin
from tests.hub.checkpoints import CONFIGS, hub_model, refused, save


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_model_is_built_again_from_plain_values(tmp_path: Path, family: str) -> None:
    model = from_pretrained(save(tmp_path / "in", family))
    plain = asdict(Origin.of("lm", model))
    torch.save(plain, tmp_path / "plain.pt")
    again = Origin(**torch.load(tmp_path / "plain.pt", weights_only=True))
    blank = again.blank()
    shown = [(name, param.shape) for name, param in model.named_parameters()]
    assert [(name, param.shape) for name, param in blank.named_parameters()] == shown
    assert all(param.is_meta for param in blank.parameters())
    assert transform_names(blank) == transform_names(model)
    assert blank.config.to_diff_dict() == model.config.to_diff_dict()
    assert again.tokenizer == str(tmp_path / "in")
    assert again.generation is not None


def test_a_model_of_no_checkpoint_has_no_source() -> None:
    origin = Origin.of("", hub_model("llama"))
    assert origin.tokenizer is None
    assert origin.transforms is None


def test_another_class_of_the_same_config_is_refused() -> None:
    model = LlamaForSequenceClassification(CONFIGS["llama"]())
    with refused(PlanError, "LlamaForCausalLM", "LlamaForSequenceClassification"):
        Origin.of("", model).blank()
