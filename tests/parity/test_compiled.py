"""Compiled layers train as those that are not, whoever compiled them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.parity.grid import Case, assert_parity

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
