"""Recordings with times that a reader can check by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table, one_f_one_b
from goose_strategy.pipeline_parallel.tables.catalogue import forward_only
from goose_strategy.pipeline_parallel.tables.chunks import Chunks

MS = 10**6
START = 5_000 * MS
COSTS = {Kind.FORWARD: 10, Kind.BACKWARD: 20}


def times(table: Table, latency: int) -> dict[Action, tuple[int, int]]:
    """Let a table run on paper, in milliseconds."""
    last = len(table) - 1
    out: dict[Action, tuple[int, int]] = {}
    queues = [list(row) for row in table]
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                action = queue[0]
                way = -1 if action.kind is Kind.FORWARD else 1
                needed = action._replace(stage=stage + way)
                has_need = 0 <= needed.stage <= last
                if has_need and needed not in out:
                    break
                free = max((end for one, (_, end) in out.items() if one.stage == stage), default=0)
                start = max(free, out[needed][1] + latency) if has_need else free
                out[action] = (start, start + COSTS[action.kind])
                queue.pop(0)
    return out


def record(
    folder: Path,
    stages: int,
    microbatches: int,
    *,
    replicas: int = 1,
    latency: int = 0,
    steps: tuple[int, ...] = (1, 2),
    train: bool = True,
    **header: Any,
) -> None:
    """Write the files of a 1F1B run: forwards take 10 ms, backwards 20 ms."""
    table = one_f_one_b(stages, microbatches)
    if not train:
        table = forward_only(Chunks(stages), microbatches)
    folder.mkdir(exist_ok=True)
    spans = times(table, latency)
    for rank in range(stages * replicas):
        stage, dp = divmod(rank, replicas)
        lines: list[dict[str, Any]] = [
            {
                "format": "goose-timeline",
                "version": 1,
                "run": "one",
                "rank": rank,
                "world": stages * replicas,
                "pp": stage,
                "dp": dp,
                "tp": 0,
                "device": "cpu",
                "times": "host",
                "clock_error": 0,
                **header,
            }
        ]
        for step in steps:
            zero = START * step
            about = {"schedule": "1F1B", "stages": stages, "microbatches": microbatches}
            lines.append({"step": step, **about, "start": zero, "end": zero + 10**4 * MS})
            for action, (start, end) in spans.items():
                for line in lines_of(action, start, end, stage, stages - 1, latency):
                    moved = {name: zero + line[name] * MS for name in ("start", "end")}
                    lines.append({**line, "step": step, **moved})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank{rank:05d}.jsonl").write_text(text, encoding="utf-8")


def lines_of(
    action: Action, start: int, end: int, stage: int, last: int, latency: int
) -> list[dict[str, Any]]:
    """Return an action of a stage with its messages."""
    if action.stage != stage:
        return []
    common = {"stage": stage, "microbatch": action.microbatch}
    kind = action.kind.value
    lines = [{**common, "kind": kind, "start": start, "end": end}]
    if stage != (0 if kind == "F" else last):
        lines.append({**common, "kind": f"RECV_{kind}", "start": max(start - 5, 0), "end": start})
    if stage != (last if kind == "F" else 0):
        lines.append({**common, "kind": f"SEND_{kind}", "start": end, "end": end + latency})
    return lines
