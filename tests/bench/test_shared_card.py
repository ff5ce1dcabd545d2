"""Ranks that share a card: on a CPU that stands in for it, and what is called wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from goose_strategy.bench import shared_card
from goose_strategy.bench.shared_card import LAYOUTS, Training, main, measure, row_of
from tests.harness.streams import FakeLane, staged
from tests.harness.worker import Context
from tests.strategies.ranks import world

GOOD = {"loss": 1e-7, "norm": 1e-7, "parameters": 1e-6}


def _both(_ctx: Context) -> list[tuple[str, bool, int]]:
    found, alone = [], None
    for layout in LAYOUTS:
        with staged(FakeLane("late")) as lane:
            alone, line, bad, groups = measure(layout, alone, dry=True)
        assert lane.copies > 0
        found.append((line, bad, groups))
    return found


def _spoilt(_ctx: Context) -> tuple[str, bool]:
    """One rank of the second training takes another step."""
    clip, calls = Fabric.clip_gradients, [0]

    def wrong(fabric: Fabric, model: Any, optimizer: Any, **settings: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 * shared_card.STEPS:
            settings["max_norm"] *= 0.5
        return clip(fabric, model, optimizer, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fabric, "clip_gradients", wrong)
        _, line, bad, _ = measure(LAYOUTS[1], None, dry=True)
    return line, bad


def test_both_layouts_agree_with_one_process_through_the_host() -> None:
    found = world(4, _both, _spoilt)
    for rank in found["both"]:
        assert [(line.split("|")[1].strip(), bad) for line, bad, _ in rank] == [
            ("tp2 x pp2", False),
            ("dp2 x pp2", False),
        ]
        assert all("the same bits" in line and groups >= 5 for line, _, groups in rank)
    for line, bad in found["spoilt"]:
        assert bad
        assert "OTHER BITS" in line


@pytest.mark.parametrize(
    ("worst", "repeats", "bad"),
    [
        ({}, True, False),
        ({}, False, True),
        ({"loss": 1e-4}, True, True),
        ({"norm": 1e-3}, True, True),
        ({"parameters": float("nan")}, True, True),
    ],
)
def test_what_counts_as_wrong(worst: dict[str, float], repeats: bool, bad: bool) -> None:
    line, wrong = row_of("tp2 x pp2", 12.3, GOOD | worst, repeats=repeats)
    assert wrong == bad
    assert line.startswith("| tp2 x pp2 | 12 | ")
    assert ("OTHER BITS" in line) is not repeats


def test_a_training_differs_by_one_bit() -> None:
    one = Training([1.0], [2.0], {"a": torch.ones(3)})
    assert not one.differs(Training([1.0], [2.0], {"a": torch.ones(3)}))
    assert one.differs(Training([1.0], [2.0], {"a": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}))
    assert one.differs(Training([1.0 + 2**-52], [2.0], {"a": torch.ones(3)}))
    assert one.differs(Training([1.0], [2.0], {}))


def test_without_a_card_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([]) == 3
    assert "torch sees no card" in capsys.readouterr().out
