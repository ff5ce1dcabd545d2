"""A recorded step in the trace event format, for Perfetto and ``chrome://tracing``."""

from __future__ import annotations

from typing import Any

from goose_strategy.bench.recording import WORK, Recording, Row, Span

_WORK_TRACK, _MESSAGE_TRACK = 0, 1


def trace(recording: Recording) -> dict[str, Any]:
    """Return the trace: a process per rank, in it a track for work and one for messages.

    Args:
        recording: The step.

    Returns:
        What goes into the file; times are microseconds.
    """
    events: list[dict[str, Any]] = []
    for index, row in enumerate(recording.rows):
        events += _names(row, index)
        events += [_complete(row, span) for span in row.work]
        events += [
            event for span in row.spans if span.kind not in WORK for event in _way(row, span)
        ]
    about = {
        "schedule": recording.schedule,
        "stages": recording.stages,
        "microbatches": recording.microbatches,
        "step": recording.step,
        "bubble": recording.bubble,
        "times": "host",
        "device": recording.device,
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _names(row: Row, index: int) -> list[dict[str, Any]]:
    name = f"rank {row.rank} (pp {row.pp}, dp {row.dp}, tp {row.tp})"
    tracks = {_WORK_TRACK: "work", _MESSAGE_TRACK: "messages"}
    return [
        {"ph": "M", "pid": row.rank, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": row.rank, "name": "process_sort_index", "args": {"sort_index": index}},
        *(
            {"ph": "M", "pid": row.rank, "tid": tid, "name": "thread_name", "args": {"name": what}}
            for tid, what in tracks.items()
        ),
    ]


def _complete(row: Row, span: Span) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "work",
        "pid": row.rank,
        "tid": _WORK_TRACK,
        "name": f"{span.kind}{span.microbatch}",
        "ts": span.start * 1e3,
        "dur": (span.end - span.start) * 1e3,
        "args": {"stage": span.stage, "microbatch": span.microbatch},
    }


def _way(row: Row, span: Span) -> list[dict[str, Any]]:
    """Messages overlap, so each is an asynchronous pair of its own."""
    common = {
        "cat": "message",
        "pid": row.rank,
        "tid": _MESSAGE_TRACK,
        "name": f"{span.kind}{span.microbatch}",
        "id": f"{row.rank}.{span.kind}{span.microbatch}.{span.stage}",
    }
    return [
        {**common, "ph": "b", "ts": span.start * 1e3},
        {**common, "ph": "e", "ts": span.end * 1e3},
    ]
