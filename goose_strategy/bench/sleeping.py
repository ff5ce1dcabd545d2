"""A model whose layers sleep: work that needs no core, as that of a GPU needs none of the host.

What a pipeline costs beyond its schedule drowns in real work, which grows when ranks share cores.
Sleeping ranks do not slow each other down, so a step over its schedule's bound is the engine alone.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

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

    def set_sleep(
        self, *, forward_s: float, backward_s: float, store: Collects | None = None
    ) -> None:
        """Let every layer sleep.

        Args:
            forward_s: Seconds in its forward.
            backward_s: Seconds in its backward, half of them for the weights.
            store: Where the weights' half is left while it collects.
        """
        for layer in self.modules():
            if isinstance(layer, SleepingLayer):
                layer.forward_s, layer.backward_s, layer.store = forward_s, backward_s, store


class SleepingLayer(nn.Module):
    """A linear layer with a residual, and two sleeps; none as it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.forward_s = 0.0
        self.backward_s = 0.0
        self.store: Collects | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's output, of the same shape, after a sleep."""
        linear = self.linear(hidden)
        times = (self.forward_s, self.backward_s)
        out: Tensor = _Sleep.apply(linear, times, self.store)  # type: ignore[no-untyped-call]
        return hidden + out


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, times: tuple[float, float], store: Collects | None
    ) -> Tensor:
        ctx.seconds, ctx.store = times[1], store
        _sleep(times[0])
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.store is not None and ctx.store.active:
            _sleep(ctx.seconds / 2)
            ctx.store.push(Nap(ctx.seconds / 2))
        else:
            _sleep(ctx.seconds)
        return gradient, None, None


class Collects(Protocol):
    """What keeps the weights' part of a backward, such as a ``WeightGradStore``."""

    active: bool

    def push(self, owed: Any) -> None:
        """Keep it."""


class Nap:
    """The weights' part of a layer's backward: no gradients, only time.

    Args:
        seconds: How long.
    """

    parameters: tuple[Tensor, ...] = ()
    held: tuple[Tensor, ...] = ()

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def compute(self) -> tuple[Tensor, ...]:
        """Take the time."""
        _sleep(self._seconds)
        return ()


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
