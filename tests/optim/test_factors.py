"""Factors are compared once, before the step on the CPU and one step later on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from goose_strategy.errors import BatchError
from goose_strategy.optim import factors as under_test
from goose_strategy.optim.factors import FactorCheck, check_factors, take_factors


def _reducer(value: Any) -> Any:
    return SimpleNamespace(factors=value)


def test_taking_sums_and_marks() -> None:
    reducers = [_reducer(1.5), _reducer(None), _reducer(torch.tensor(2.0))]
    assert float(take_factors(reducers)) == 3.5
    assert [reducer.factors for reducer in reducers] == [None, None, None]
    assert take_factors(reducers) == 0.0


def test_equal_factors_pass_and_others_are_listed() -> None:
    check_factors([])
    check_factors([0.25, 0.25])
    check_factors([float("nan"), float("nan")])
    with pytest.raises(BatchError, match=r"different factors, \[1.0, 0.0\] by rank"):
        check_factors([1.0, 0.0])


def test_without_a_call_nothing_is_exchanged() -> None:
    # Any exchange would look at the mesh.
    assert FactorCheck(None).exchange(_reducer(None)) == []


def test_a_device_is_read_one_step_later(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Event:
        def __init__(self, device: torch.device) -> None:
            events.append(f"made on {device}")

        def record(self) -> None:
            events.append("recorded")

        def synchronize(self) -> None:
            events.append("waited")

    monkeypatch.setattr(under_test.torch, "Event", Event)
    check = FactorCheck(None)
    assert check._later(torch.tensor([1.0, 2.0])) == []
    assert events == ["made on cpu", "recorded"]
    assert check._later(torch.tensor([3.0, 3.0])) == [1.0, 2.0]
    assert events[2:] == ["waited", "made on cpu", "recorded"]
    assert check._later(torch.tensor([5.0, 5.0])) == [3.0, 3.0]
