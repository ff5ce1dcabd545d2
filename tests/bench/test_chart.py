"""The chart lists every action where it happened, and every message between its two rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from goose_strategy.bench.chart import COLOURS, LINES, make_chart
from goose_strategy.bench.recording import Recording, Row, Span, load
from tests.bench.recorded import record


def test_boxes_and_messages(tmp_path: Path) -> None:
    record(tmp_path, 2, 2, latency=3)
    chart = make_chart(load(tmp_path))
    assert chart.title == "1F1B: 2 stages, 2 microbatches, step 2"
    assert chart.rows == ("stage 0\nrank 0", "stage 1\nrank 1")
    assert len(chart.boxes) == 8
    box = next(box for box in chart.boxes if box.row == 1 and box.colour == COLOURS["B"])
    assert (box.start, box.end, box.label) == (23.0, 43.0, "0")
    assert box.tip == "backward of microbatch 0 on stage 1, 20.000 ms"
    assert [(m.source, m.target, m.sent, m.taken) for m in chart.messages] == [
        (1, 0, 43.0, 46.0),
        (1, 0, 73.0, 76.0),
        (0, 1, 10.0, 13.0),
        # Sent at 20, taken once the backward of the first is done.
        (0, 1, 20.0, 43.0),
    ]
    assert [message.colour for message in chart.messages] == [LINES["B"]] * 2 + [LINES["F"]] * 2
    assert [meaning for _, meaning in chart.legend] == ["forward", "backward"]
    assert [meaning for _, meaning in chart.lines] == ["hidden states", "their gradients"]
    assert chart.duration == 96.0
    assert chart.idle == ("38%", "38%")


def test_costs_are_told(tmp_path: Path) -> None:
    record(tmp_path, 4, 8)
    told = make_chart(load(tmp_path)).subtitle
    assert told.startswith("330.0 ms; bubble 27.3% measured, 27.3% predicted")


@pytest.mark.parametrize(
    ("header", "note"),
    [
        ({}, ""),
        ({"device": "cuda"}, "Times of the host, at which it launched work on cuda."),
        ({"clock_error": 40_000}, "Clocks of two ranks agree to 0.080 ms."),
    ],
)
def test_doubts_are_told(tmp_path: Path, header: dict[str, object], note: str) -> None:
    record(tmp_path, 2, 2, **header)
    assert make_chart(load(tmp_path)).note == note


def test_ranks_of_several_pipelines_are_told_apart(tmp_path: Path) -> None:
    record(tmp_path, 2, 2, replicas=2, latency=1)
    chart = make_chart(load(tmp_path))
    assert chart.rows[2] == "stage 0\nrank 1, dp 1, tp 0"
    assert {(m.source, m.target) for m in chart.messages} == {(0, 1), (1, 0), (2, 3), (3, 2)}


def test_a_split_backward_is_told_apart_and_needs_a_longer_legend(tmp_path: Path) -> None:
    record(tmp_path, 2, 2)
    whole = load(tmp_path)
    assert not make_chart(whole).legend_is_long
    kinds = {"B": ("R", "I", "W")}
    rows = tuple(
        replace(
            row,
            spans=tuple(
                span._replace(kind=kind)
                for span in row.spans
                for kind in kinds.get(span.kind, (span.kind,))
            ),
        )
        for row in whole.rows
    )
    chart = make_chart(replace(whole, rows=rows))
    assert [meaning for _, meaning in chart.legend] == [
        "forward",
        "gradients of inputs",
        "gradients of weights",
        "recompute",
    ]
    assert chart.legend_is_long


def test_a_rank_with_several_stages() -> None:
    def spans(*actions: tuple[str, int, float]) -> tuple[Span, ...]:
        return tuple(Span(kind, stage, 0, start, start + 10) for kind, stage, start in actions)

    down = spans(("F", 0, 0), ("SEND_F", 0, 10), ("RECV_F", 3, 30), ("F", 3, 40))
    up = spans(("RECV_F", 1, 5), ("F", 1, 15), ("F", 2, 25), ("SEND_F", 2, 35))
    rows = (Row(0, 0, 0, 0, down), Row(1, 1, 0, 0, up))
    chart = make_chart(Recording(1, (1,), "ZBVZeroBubble", 4, 1, "cpu", 0.0, rows))
    assert chart.rows == ("stages 0, 3\nrank 0", "stages 1, 2\nrank 1")
    assert [(m.source, m.target, m.sent, m.taken) for m in chart.messages] == [
        (1, 0, 35.0, 40.0),
        (0, 1, 10.0, 15.0),
    ]
    # The later stage of a rank is paler.
    first, second = (box.colour for box in chart.boxes if box.row == 0)
    assert first == COLOURS["F"]
    assert second == "#769ACC"
