"""A model whose layers sleep: work that needs no core, as that of a GPU needs none of the host.

What a pipeline costs beyond its schedule drowns in real work, which grows when ranks share cores.
Sleeping ranks do not slow each other down, so a step over its schedule's bound is the engine alone.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

VOCABULARY = 64
COLUMNS = 16
WIDTH = 64
"""One row's hidden states are ``COLUMNS * WIDTH`` floats, 4 KiB."""


class SleepingModel(nn.Module):
    """An embedding, a stack of layers that sleep once `set_sleep` was called, and a head.

    Args:
        layers: Number of layers.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([SleepingLayer() for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Return ``logits``, and with ``labels`` the ``loss``, a sum over all tokens."""
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return {"logits": logits} | ({} if labels is None else {"loss": sum_loss(logits, labels)})

    def set_sleep(self, *, forward_s: float, backward_s: float) -> None:
        """Let every layer sleep this many seconds in its forward and in its backward."""
        for layer in self.layers.modules():
            if isinstance(layer, SleepingLayer):
                layer.forward_s, layer.backward_s = forward_s, backward_s


class SleepingLayer(nn.Module):
    """A linear layer with a residual, and two sleeps; none as it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.forward_s = 0.0
        self.backward_s = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's output, of the same shape, after a sleep."""
        linear = self.linear(hidden)
        out: Tensor = _Sleep.apply(linear, self.forward_s, self.backward_s)  # type: ignore[no-untyped-call]
        return hidden + out


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.seconds = backward_s
        _sleep(forward_s)
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        _sleep(ctx.seconds)
        return gradient, None, None


def _sleep(seconds: float) -> None:
    if seconds:  # even a sleep of 0 s yields the core
        time.sleep(seconds)


def sum_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross entropy; a sum, so that microbatches add up to the batch."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def make_batch(rows: int, seed: int) -> dict[str, Tensor]:
    """Return random ``input_ids`` and ``labels`` of ``rows`` rows and `COLUMNS` columns."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, COLUMNS)
    return {
        name: torch.randint(VOCABULARY, shape, generator=generator)
        for name in ("input_ids", "labels")
    }
