"""What the Trainer does, in one process and without it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from tests.harness.compare import assert_close_named, assert_close_numbers, token_loss
from tests.harness.models import Batch, batches, tiny_model
from tests.parity.grid import assemble
from tests.strategies.lightning_module import VALIDATE
from tests.strategies.ranks import pieces

EXACT = 1e-10


def parameters(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    model = trainer.strategy.runtime.model_of(module)  # type: ignore[attr-defined]
    return pieces(model)


def loop(
    data: Sequence[Batch],
    *,
    accumulate: int = 1,
    norm: float | None = None,
    value: float | None = None,
    model: Any = None,
    only: str = "",
) -> tuple[list[float], Any]:
    """Train in one process as the Trainer does."""
    model = tiny_model("llama") if model is None else model
    chosen = [p for n, p in model.named_parameters() if n.startswith(only)]
    optimizer = AdamW(chosen, lr=1e-2, weight_decay=0.01 if only else 0.1)
    scheduler = StepLR(optimizer, 10**6 if only else 2, 0.5)
    losses = []
    for index, batch in enumerate(data, start=1):
        loss = whole_loss(model, batch)
        losses.append(loss.item())
        (loss / accumulate).backward()
        if index % accumulate:
            continue
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(chosen, norm)
        if value is not None:
            torch.nn.utils.clip_grad_value_(chosen, value)
        optimizer.step()
        model.zero_grad()
        scheduler.step()
    return losses, model


def whole_loss(model: Any, batch: Batch) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return token_loss(model(**inputs).logits, batch["labels"])


def validation_loss(model: Any) -> float:
    with torch.no_grad():
        losses = [whole_loss(model, batch).item() for batch in batches(2, seed=VALIDATE)]
    return sum(losses) / 2


def compare(ranks: list[Any], losses: list[float], model: Any) -> None:
    for rank in ranks:
        assert_close_numbers(rank["losses"], losses, EXACT)
    named = {f"model.{name}": p for name, p in model.named_parameters()}
    assert_close_named(assemble([rank["parameters"] for rank in ranks], "fit"), named, 1e-9)
