"""A loss function must give every sample a loss of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from goose_strategy.errors import PrivacyError
from goose_strategy.privacy.losses import CHECKED_CALLS, PerSampleLoss

LOGITS = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
MICROBATCH: dict[str, Any] = {"labels": torch.arange(12).view(4, 3), "scale": 2.0}
OUTPUTS = CausalLMOutputWithPast(logits=LOGITS)


def good(outputs: Any, microbatch: dict[str, Any]) -> tuple[Tensor, int]:
    weights = microbatch["labels"].float().sum(1)
    return outputs["logits"].square().mean((1, 2)) * weights * microbatch["scale"], 3


def test_a_good_loss_is_summed() -> None:
    loss, count = PerSampleLoss(good)(OUTPUTS, MICROBATCH)
    assert torch.equal(loss, good(OUTPUTS, MICROBATCH)[0].sum())
    assert int(count) == 4
    plain, _ = PerSampleLoss(lambda *args: good(*args)[0])(OUTPUTS, MICROBATCH)
    assert torch.equal(plain, loss)


@pytest.mark.parametrize(
    "coupled",
    [
        lambda o, m: good(o, m)[0] / m["labels"].sum(),
        lambda o, m: good(o, m)[0] * o["logits"].mean(),
        lambda o, m: good(o, m)[0].flip(0),
        lambda o, m: good(o, m)[0] / o["logits"].shape[0],
    ],
    ids=["by all tokens", "by all logits", "of another row", "by the rows"],
)
def test_a_loss_that_couples_samples_is_refused(coupled: Any) -> None:
    with pytest.raises(PrivacyError, match="depend on one another"):
        PerSampleLoss(coupled)(OUTPUTS, MICROBATCH)


def test_a_loss_of_another_shape_is_refused() -> None:
    for wrong in (lambda o, m: good(o, m)[0].mean(), lambda o, _: o["logits"].mean(2)):
        with pytest.raises(PrivacyError, match="one loss per sample"):
            PerSampleLoss(wrong)(OUTPUTS, MICROBATCH)


def test_it_is_tried_in_the_first_calls_only() -> None:
    calls: list[int] = []

    def counted(outputs: Any, microbatch: dict[str, Any]) -> Tensor:
        calls.append(outputs["logits"].shape[0])
        return good(outputs, microbatch)[0]

    loss = PerSampleLoss(counted)
    for _ in range(CHECKED_CALLS + 3):
        loss(OUTPUTS, MICROBATCH)
    assert calls.count(1) == 2 * CHECKED_CALLS
    assert calls.count(4) == CHECKED_CALLS + 3


def test_a_row_that_is_not_finite_is_nobodys_fault() -> None:
    logits = LOGITS.clone()
    logits[0] = float("nan")
    PerSampleLoss(good)(CausalLMOutputWithPast(logits=logits), MICROBATCH)


@dataclass
class Output:
    """What a model of somebody else's returns."""

    logits: Tensor

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def test_outputs_that_are_no_mapping_are_cut_too() -> None:
    loss, _ = PerSampleLoss(good)(Output(LOGITS), MICROBATCH)
    assert torch.equal(loss, good(OUTPUTS, MICROBATCH)[0].sum())
