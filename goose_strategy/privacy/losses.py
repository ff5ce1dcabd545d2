"""A loss of the user's own, which must give every sample a loss of its own.

A mean over the tokens of a batch divides each sample's gradient by what the other samples hold: the
sum of clipped gradients then moves by more than the norm when one sample leaves (up to 1.5 times in
a measurement). A shape cannot show that, so the loss is tried on one row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from goose_strategy.errors import PrivacyError

CHECKED_CALLS = 8
"""Calls whose losses are compared with those of single rows."""


class PerSampleLoss:
    """Checks and sums the losses that a ``loss_fn`` returns.

    Args:
        loss_fn: ``(outputs, microbatch) -> (losses [rows], anything)``, or the losses alone.
    """

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        self._loss_fn = loss_fn
        self._calls = 0

    def __call__(self, outputs: Any, microbatch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the sum over samples, and their number.

        Raises:
            PrivacyError: If there is not one loss per row, or a row's loss depends on other rows.
        """
        logits = outputs["logits"]
        rows = logits.shape[0]
        losses = self._losses(outputs, microbatch)
        if losses.shape != (rows,):
            raise PrivacyError(
                f"loss_fn returned a loss of shape {tuple(losses.shape)} for {rows} samples; "
                "private training needs one loss per sample, of shape [rows], in which no other "
                "sample occurs: a mean over its own tokens, not over those of the batch."
            )
        if self._calls < CHECKED_CALLS and rows > 1:
            self._calls += 1
            self._try_alone(outputs, microbatch, losses.detach())
        return losses.sum(), torch.tensor(rows)

    def _losses(self, outputs: Any, microbatch: dict[str, Any]) -> Tensor:
        returned = self._loss_fn(outputs, microbatch)
        losses: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return losses

    @torch.no_grad()
    def _try_alone(self, outputs: Any, microbatch: dict[str, Any], losses: Tensor) -> None:
        rows = losses.shape[0]
        for row in (0, rows - 1):
            alone = self._losses(_row(outputs, row, rows), dict(_row(microbatch, row, rows)))
            both_bad = not bool(torch.isfinite(alone).all() & torch.isfinite(losses[row]))
            if both_bad or torch.allclose(alone[0], losses[row], rtol=1e-3, atol=1e-5):
                continue
            raise PrivacyError(
                f"loss_fn gives a sample the loss {float(losses[row]):.6g} among {rows} samples "
                f"and {float(alone[0]):.6g} alone, so samples depend on one another; divide each "
                "sample's loss by its own number of tokens, or by a constant."
            )


def _row(values: Any, row: int, rows: int) -> Any:
    """Return one row of everything in a mapping that has rows."""
    items = values.items() if isinstance(values, Mapping) else vars(values).items()
    cut = {
        name: value[row : row + 1]
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows
        else value
        for name, value in items
    }
    if type(values) is dict or not isinstance(values, Mapping):
        return cut
    return type(values)(**cut)
