"""The page is well formed, needs nothing from anywhere, and draws to scale."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from goose_strategy.bench.chart import COLOURS, make_chart
from goose_strategy.bench.page import LEFT, RIGHT, WIDTH, html, ticks
from goose_strategy.bench.recording import load
from tests.bench.recorded import record

SVG = "{http://www.w3.org/2000/svg}"


def test_the_page_holds_the_chart_to_scale(tmp_path: Path) -> None:
    record(tmp_path, 2, 2, latency=3)
    chart = make_chart(load(tmp_path))
    page = html(chart)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|<script|<link|url\(", page)
    svg = re.search(r"<svg.*</svg>", page, re.DOTALL)
    assert svg
    tree = ElementTree.fromstring(svg[0])
    backward = [r for r in tree.iter(f"{SVG}rect") if r.get("fill") == COLOURS["B"] and len(r)]
    assert len(backward) == 4
    per_ms = (WIDTH - LEFT - RIGHT) / chart.duration
    drawn = {
        (rect[0].text, float(rect.get("x", 0)), float(rect.get("width", 0))) for rect in backward
    }
    wanted = [box for box in chart.boxes if box.colour == COLOURS["B"]]
    assert drawn == {
        (box.tip, round(LEFT + box.start * per_ms, 2), round((box.end - box.start) * per_ms, 2))
        for box in wanted
    }
    assert len(list(tree.iter(f"{SVG}line"))) == len(chart.messages) + len(ticks(chart.duration))
    words = [text.text for text in tree.iter(f"{SVG}text")]
    assert words.count("0") >= 4
    assert chart.title in words


def test_narrow_boxes_carry_no_number(tmp_path: Path) -> None:
    record(tmp_path, 4, 200)
    chart = make_chart(load(tmp_path))
    assert "pointer-events" not in html(chart)


@pytest.mark.parametrize(
    ("duration", "marks"),
    [(96.0, [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]), (0.5, [0, 0.05, 0.1]), (700.0, [0, 100])],
)
def test_marks_are_round(duration: float, marks: list[float]) -> None:
    assert ticks(duration)[: len(marks)] == marks
    assert ticks(duration)[-1] <= duration
    assert 5 <= len(ticks(duration)) <= 13
