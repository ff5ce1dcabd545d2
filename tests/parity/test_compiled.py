"""Compiled layers train as those that are not, whoever compiled them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from goose_strategy.runtime.core import ParallelRuntime
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.parity.grid import DEADLINE, Case, assert_parity

pytestmark = pytest.mark.timeout(120)
COMPILED = ("compile_layers", "aot_eager")


@dataclass(frozen=True)
class ByHand(Case):
    """The user has called ``compile()`` on every layer."""

    def model(self) -> nn.Module:
        model: Any = super().model()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        return model


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("recompute", ["none", "full", "layer"])
@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_compiled_by_the_setting(mesh: dict[str, int], recompute: str) -> None:
    if recompute == "full" and "pp" not in mesh:
        pytest.skip("there are no stages to compute again")
    pipeline = (COMPILED, ("recompute", recompute))
    assert_parity(Case(steps=2, pipeline=pipeline, **mesh))


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "LoopedBFS"])
def test_under_every_schedule_that_may(schedule: str) -> None:
    assert_parity(Case(schedule=schedule, pp=2, steps=2, pipeline=(COMPILED,)))


@pytest.mark.parametrize("recompute", ["none", "full", "layer"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_compiled_by_the_user(mesh: dict[str, int], recompute: str) -> None:
    if recompute == "full" and "pp" not in mesh:
        pytest.skip("there are no stages to compute again")
    assert_parity(ByHand(steps=2, pipeline=(("recompute", recompute),), **mesh))


def test_several_stages_of_a_rank_compiled_by_the_user() -> None:
    assert_parity(ByHand(schedule="Interleaved1F1B", pp=2, steps=2))


def _one_call(ctx: Context, case: Case, wrong: bool) -> tuple[float, int]:
    """Return the loss of the first batch, and the number of graphs that were compiled for it."""
    torch.compiler.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        if not wrong:
            return graph.forward
        return lambda *args: [t * 1.01 if _is_hidden(t) else t for t in graph.forward(*args)]

    with _compiling(backend):
        runtime = ParallelRuntime(case.config())
        runtime.start(torch.device("cpu"), timeout=DEADLINE)
        try:
            model = case.model()
            runtime.shard_module(model)
            loss = model(**case.batches()[0]).loss
            return loss.item(), len(graphs)
        finally:
            runtime.stop()
            torch.compiler.reset()


def _is_hidden(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3


@contextmanager
def _compiling(backend: Any) -> Iterator[None]:
    """Let everything that is compiled inside go through one backend."""
    own = torch.compile
    with patch.object(torch, "compile", lambda f, **_: own(f, backend=backend)):
        yield


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}], ids=str)
def test_layers_really_are_compiled(mesh: dict[str, int], by_hand: bool) -> None:
    """A backend that is a percent off must show."""
    case = ByHand(**mesh) if by_hand else Case(pipeline=(COMPILED,), **mesh)
    plain = Case(**mesh)
    (expected, none), *_ = run_ranks(_one_call, 2, plain, False)
    assert none == 0
    for wrong in (False, True):
        for loss, graphs in run_ranks(_one_call, 2, case, wrong):
            assert graphs > 0
            assert (abs(loss - expected) > 1e-6) == wrong
