"""Layers that are computed again in the backward drop what they had dropped.

Fresh masks in a recomputation were reported for OLMo-core (issue 828): the trained model's cross
entropy was 2.49 in the place of 2.19.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.tensor_parallel.dropout import LocalStream
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.parity.grid import DEADLINE, Case, about, train
from tests.parity.session import MeshSession
from tests.parity.test_dropout import DROPS, GPT2, SEED, recorded


@dataclass(frozen=True)
class Recomputed(Case):
    """A case whose layers are recomputed in the backward, as transformers' flag does it."""

    reentrant: bool = False

    def model(self) -> Any:
        model: Any = super().model()
        name = "activation_checkpointing_enable"
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": self.reentrant})
        return model


REPLAYED = [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2}]


def _calls(ctx: Context, case: Case) -> tuple[list[dict[str, Tensor]], int]:
    torch.manual_seed(SEED)
    runtime = ParallelRuntime(case.config())
    runtime.start(torch.device("cpu"), timeout=DEADLINE)
    seen: list[Tensor] = []
    try:
        session = MeshSession(runtime, case.model(), optimizer="sgd", autocast=None)
        torch.manual_seed(SEED)
        with recorded(seen):
            train(session, case)
        record = session.finish()
    finally:
        runtime.stop()
    steps = [{name: t for name, (_, t) in pieces.items()} for pieces in record.gradients]
    return steps, len(seen)


def assert_replayed(plain: Case, reentrant: bool) -> None:
    again = Recomputed(**vars(plain), reentrant=reentrant)
    ranks = [run_ranks(_calls, case.world_size, case) for case in (plain, again)]
    for rank, ((first, drawn), (second, redrawn)) in enumerate(zip(*ranks, strict=True)):
        assert redrawn > drawn, "no layer was computed again"
        for mine, theirs in zip(first, second, strict=True):
            for name, grad in mine.items():
                with about(f"rank {rank}, {name}"):
                    assert torch.equal(grad, theirs[name]), "other masks in the recomputation"


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved", "reentrant"])
@pytest.mark.parametrize("mesh", REPLAYED, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_recomputed_layers_drop_what_they_dropped(
    family: Any, mesh: dict[str, int], reentrant: bool
) -> None:
    drops = DROPS if family == "gpt2" else (("attention_dropout", 0.3), DROPS[-1])
    case = Case(family=family, settings=drops, steps=2, microbatches=2, **mesh)
    assert_replayed(case, reentrant)


def test_layers_that_end_with_a_row_layer() -> None:
    """Nothing behind opt's second linear layer is saved, so that its recomputation ends in it."""
    drops = (("attention_dropout", 0.3), DROPS[-1])
    assert_replayed(Case(family="opt", settings=drops, steps=2, microbatches=2, tp=2), False)


def fresh_masks() -> AbstractContextManager[object]:
    """A local stream that goes on by itself, whatever the shared one is."""
    calls = iter(range(10**6))
    enter = LocalStream.enter

    def forgetful(self: LocalStream) -> None:
        if self._shared is None:
            enter(self)
            self._start = self._generators.seed(next(calls))

    return patch.object(LocalStream, "enter", forgetful)


def _forgetful(ctx: Context, case: Case) -> tuple[list[dict[str, Tensor]], int]:
    with fresh_masks():
        return _calls(ctx, case)


def test_a_recomputation_with_fresh_masks_is_found() -> None:
    plain = replace(GPT2, tp=2, steps=1)
    again = Recomputed(**vars(plain))
    first, second = (run_ranks(_forgetful, 2, case)[0][0][0] for case in (plain, again))
    assert any(not torch.equal(first[name], second[name]) for name in first)
