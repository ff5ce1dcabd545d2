"""The reference and the comparisons, which must see small and missing differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.harness.compare import (
    adamw,
    assert_close_named,
    assert_close_numbers,
    named_gradients,
    reference_run,
    relative_error,
    token_loss,
)
from tests.harness.models import batches, tiny_model


def test_loss_equals_that_of_transformers_up_to_its_fp32_cast() -> None:
    model, (batch,) = tiny_model("llama"), batches(1)
    run = reference_run(model, [batch])
    assert run.losses[0] == pytest.approx(model(**batch).loss.item(), rel=1e-6)


def test_loss_without_labels_is_zero() -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64)
    assert token_loss(logits, torch.full((2, 5), -100)).item() == 0.0


def test_a_run_is_the_plain_loop() -> None:
    model = tiny_model("qwen3", tied=True)
    model.model.embed_tokens.requires_grad_(False)
    data = batches(4)
    run = reference_run(model, data, accumulate=2, max_norm=0.5)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(2):
        pair = data[2 * step : 2 * step + 2]
        for batch in pair:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            logits = model(input_ids=ids, attention_mask=mask).logits
            (token_loss(logits, batch["labels"]) / 2).backward()
        assert_close_named(named_gradients(model), run.gradients[step], rel=1e-14)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.item() == pytest.approx(run.norms[step], rel=1e-14)
        optimizer.step()
        optimizer.zero_grad()
    assert len(run.losses) == 4
    assert "model.embed_tokens.weight" not in run.gradients[0]
    assert_close_named(dict(model.named_parameters()), run.parameters, rel=1e-14)


def test_a_run_leaves_the_model_alone() -> None:
    model = tiny_model("llama", layers=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = reference_run(model, batches(1))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(run.parameters["model.norm.weight"], before["model.norm.weight"])


def test_a_small_difference_fails_and_is_named() -> None:
    right = {"a": torch.ones(4), "b": torch.ones(4)}
    wrong = {"a": torch.ones(4), "b": torch.ones(4) * 1.001}
    assert_close_named(right, right, rel=0.0)
    with pytest.raises(AssertionError, match=r"1 of 2 tensors .*\n  b: 1\.0"):
        assert_close_named(wrong, right, rel=1e-4)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ({}, "missing"),
        ({"a": torch.ones(2), "b": torch.ones(2)}, "unexpected"),
        ({"a": torch.ones(3)}, "a: "),
        ({"a": torch.tensor([1.0, float("nan")])}, "1 of 1 tensors"),
    ],
)
def test_what_cannot_be_compared_fails(actual: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_close_named(actual, {"a": torch.ones(2)}, rel=1.0)


def test_a_zero_reference_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="the reference is zero"):
        relative_error(torch.zeros(2), torch.zeros(2))
    with pytest.raises(AssertionError, match="no names"):
        assert_close_named({}, {}, rel=1.0)


def test_numbers_are_compared_one_by_one() -> None:
    assert_close_numbers([1.0, 2.0], [1.0, 2.0], rel=0.0)
    with pytest.raises(AssertionError, match="number 1"):
        assert_close_numbers([1.0, 2.1], [1.0, 2.0], rel=1e-2)
    with pytest.raises(AssertionError):
        assert_close_numbers([1.0], [1.0, 2.0], rel=1.0)
