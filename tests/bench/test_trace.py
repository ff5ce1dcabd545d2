"""The trace has the form that Perfetto reads: a process per rank, tracks for work and messages."""

from __future__ import annotations

import itertools
from pathlib import Path

from goose_strategy.bench.recording import load
from goose_strategy.bench.trace import trace
from tests.bench.recorded import record


def test_the_trace_is_valid_and_complete(tmp_path: Path) -> None:
    record(tmp_path, 2, 3, latency=2)
    recording = load(tmp_path)
    made = trace(recording)
    events = made["traceEvents"]
    assert made["otherData"]["bubble"] == recording.bubble
    work = [event for event in events if event["ph"] == "X"]
    assert len(work) == 2 * 3 * 2
    assert all(event["dur"] > 0 and event["ts"] >= 0 and event["tid"] == 0 for event in work)
    first = next(event for event in work if event["pid"] == 1 and event["name"] == "B0")
    assert (first["ts"], first["dur"]) == (22e3, 20e3)
    # Complete events of one track may not overlap.
    for rank in (0, 1):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in work if e["pid"] == rank)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    # Each asynchronous begin has its end.
    open_ones = {(e["pid"], e["cat"], e["id"], e["name"]) for e in events if e["ph"] == "b"}
    closed = {(e["pid"], e["cat"], e["id"], e["name"]) for e in events if e["ph"] == "e"}
    assert open_ones == closed
    assert len(open_ones) == 2 * 3 * 2
    names = {(e["pid"], e.get("tid")): e["args"] for e in events if e["ph"] == "M" and "tid" in e}
    assert names == {
        (rank, tid): {"name": what}
        for rank in (0, 1)
        for tid, what in enumerate(("work", "messages"))
    }
