"""The picture shows the chart's colours where its boxes are; without matplotlib it says so."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from goose_strategy.bench.chart import COLOURS, make_chart
from goose_strategy.bench.picture import png
from goose_strategy.bench.recording import load
from goose_strategy.errors import ConfigError
from tests.bench.recorded import record


def test_the_picture_has_boxes_of_the_right_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    record(tmp_path / "in", 4, 8)
    png(make_chart(load(tmp_path / "in")), tmp_path / "x.png")
    pixels = imread(tmp_path / "x.png")
    height, width = pixels.shape[:2]
    assert 1000 < width < 1200
    assert 250 < height < 450

    def share(kind: str) -> float:
        """Part of the picture that has a kind's colour; numbers and borders are white."""
        wanted = [int(COLOURS[kind][i : i + 2], 16) / 255 for i in (1, 3, 5)]
        same = abs(pixels[:, :, :3] - wanted).max(axis=2) < 0.02
        return float(same.mean())

    assert 0.05 < share("F") < share("B")
    assert share("B") / share("F") == pytest.approx(2, rel=0.15)
    assert share("W") < 0.001


def test_without_matplotlib_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path, 2, 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'goose-strategy\[plots\]', or write .html"):
        png(make_chart(load(tmp_path)), tmp_path / "x.png")
