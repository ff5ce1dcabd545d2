"""Files are joined to what happened, bubbles are right, and foreign folders are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from goose_strategy.bench.recording import Row, Span, load, replay
from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.schedule import Kind
from goose_strategy.pipeline_parallel.tables.catalogue import forward_only
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from tests.bench.recorded import record, times


def test_a_step_is_read_as_it_was(tmp_path: Path) -> None:
    record(tmp_path, 2, 3, replicas=2, latency=4, clock_error=500_000)
    recording = load(tmp_path)
    assert (recording.step, recording.steps) == (2, (1, 2))
    assert (recording.schedule, recording.stages, recording.microbatches) == ("1F1B", 2, 3)
    assert recording.clock_error == 1.0
    # Pipeline by pipeline, not by rank.
    assert [(row.rank, row.pp, row.dp) for row in recording.rows] == [
        (0, 0, 0),
        (2, 1, 0),
        (1, 0, 1),
        (3, 1, 1),
    ]
    first = recording.rows[0].work
    # F0 F1, then B0 once stage 1 has sent its gradient: 10 + 4 + 10 + 20 + 4.
    assert [(s.kind, s.microbatch, s.start, s.end) for s in first[:3]] == [
        ("F", 0, 0.0, 10.0),
        ("F", 1, 10.0, 20.0),
        ("B", 0, 48.0, 68.0),
    ]
    assert [span.kind for span in recording.rows[0].spans].count("SEND_F") == 3


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 8), (4, 2)])
def test_without_latency_the_bubble_is_the_theorys(
    tmp_path: Path, stages: int, microbatches: int
) -> None:
    record(tmp_path, stages, microbatches, replicas=2)
    recording = load(tmp_path, 1)
    theory = (stages - 1) / (microbatches + stages - 1)
    assert recording.bubble == pytest.approx(theory, abs=1e-9)
    assert recording.least_bubble == pytest.approx(theory, abs=1e-9)
    assert recording.duration == pytest.approx(30 * (microbatches + stages - 1))


def test_slow_messages_widen_the_measured_bubble_only(tmp_path: Path) -> None:
    record(tmp_path, 4, 8, latency=7)
    recording = load(tmp_path)
    assert recording.least_bubble == pytest.approx(3 / 11, abs=1e-9)
    assert recording.bubble > 0.3


def test_split_backwards_and_recomputes_are_replayed() -> None:
    """The next stage needs I, not W; R needs nothing; the last stage needs its own forward."""
    first = [("F", 0, 10), ("R", 0, 6), ("I", 0, 10), ("W", 0, 8)]
    last = [("F", 0, 10), ("I", 0, 10), ("W", 0, 50)]
    rows = [
        Row(stage, stage, 0, 0, tuple(Span(k, stage, m, 100.0, 100.0 + c) for k, m, c in work))
        for stage, work in enumerate((first, last))
    ]
    done = replay(rows, 2)
    assert [[(span.start, span.end) for span in row] for row in done] == [
        [(0, 10), (10, 16), (30, 40), (40, 48)],
        [(10, 20), (20, 30), (30, 80)],
    ]


def test_an_evaluation_is_replayed_too() -> None:
    spans = times(forward_only(Chunks(3), 4), 5)
    rows = [
        Row(
            s, s, 0, 0, tuple(Span("F", s, a.microbatch, *t) for a, t in spans.items() if a[0] == s)
        )
        for s in range(3)
    ]
    assert next(iter(spans)).kind is Kind.FORWARD
    assert replay(rows, 3)[2][-1].end == 60


def test_a_hole_in_a_recording_is_named(tmp_path: Path) -> None:
    record(tmp_path, 2, 2)
    whole = load(tmp_path)
    first, second = whole.rows
    cut = Row(0, 0, 0, 0, tuple(s for s in first.spans if (s.kind, s.microbatch) != ("F", 1)))
    with pytest.raises(ConfigError, match=r"lacks what [01][FB]1 waited for"):
        _ = replace(whole, rows=(cut, second)).least_bubble


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        load(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"holds no rank\*.jsonl; train with TimelineRecorder"):
        load(tmp_path)
    foreign = tmp_path / "rank00000.jsonl"
    for text, message in {
        "": "is no timeline; name a folder",
        "[1]\n": "is no timeline; name a folder",
        '{"format": "other"}\n': "is no timeline; name a folder",
        "{broken": "is no timeline: ",
        '{"format": "goose-timeline", "version": 99}\n': "version=99, this goose3d reads 1",
    }.items():
        foreign.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            load(tmp_path)
    foreign.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(ConfigError, match="is no timeline"):
        load(tmp_path)


def test_parts_of_a_recording_are_refused(tmp_path: Path) -> None:
    record(tmp_path, 3, 2)
    (tmp_path / "rank00001.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"lacks the files of ranks \[1\]"):
        load(tmp_path)
    record(tmp_path, 2, 2, run="another")
    with pytest.raises(ConfigError, match="mixes files of several runs"):
        load(tmp_path)


def test_a_step_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    record(tmp_path, 2, 2)
    with pytest.raises(ConfigError, match=r"step=7 is not recorded in .*; recorded: 1, 2"):
        load(tmp_path, 7)
