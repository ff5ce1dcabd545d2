"""The exchanges of a step are watched; the user's closure in it is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.optim import SGD

from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import started


def _watched(ctx: Context) -> dict[str, Any]:
    open_blocks: list[str] = []
    seen: list[str] = []

    @contextmanager
    def watch(what: str) -> Iterator[None]:
        seen.append(what)
        open_blocks.append(what)
        yield
        open_blocks.remove(what)

    with started(1, 1) as runtime:
        module = nn.Linear(2, 1, bias=False)
        handle = runtime.shard_module(module)
        optimizer = SGD(module.parameters(), lr=1.0)
        with patch.object(handle, "watch", watch):
            handle.attach([optimizer])
        before = module.weight.detach().clone()

        def closure() -> float:
            assert open_blocks == []
            optimizer.zero_grad()
            loss = module(torch.full((1, 2), float(ctx.rank))).sum()
            with runtime.backward(loss):
                loss.backward()
            return loss.item()

        optimizer.step(closure)
        with_closure = list(seen)
        seen.clear()
        optimizer.step()
        return {
            "closure": with_closure,
            "plain": seen,
            "moved": torch.equal(module.weight, before - 1.0),
        }


def test_exchanges_are_watched_and_closures_are_not() -> None:
    for found in run_ranks(_watched, 2):
        assert found["closure"] == ["gradient reduction", "optimizer step"]
        assert found["plain"] == ["gradient reduction", "optimizer step"]
        assert found["moved"]
