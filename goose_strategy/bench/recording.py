"""A recorded step read back, and what its pipeline lost in waiting.

``TimelineRecorder`` writes a file per rank and measures nothing itself. Here the files are joined,
and the idle share of a step is set beside the least one that its own work allows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.timeline import FORMAT, PATTERN, VERSION

WORK = ("F", "B", "I", "W", "R")
"""Kinds that keep a rank busy; the others are messages."""


class Span(NamedTuple):
    """One action.

    Attributes:
        kind: In the notation of the tables: ``"F"``, ``"SEND_F"``...
        stage: Stage.
        microbatch: Index of the microbatch.
        start: Milliseconds since the step's first mark on any rank.
        end: The same.
    """

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Row:
    """What one rank did in a step.

    Attributes:
        rank: Global rank.
        pp: Its place in the pipeline.
        dp: Its replica.
        tp: Its place in a tensor parallel group.
        spans: Its actions, by start.
    """

    rank: int
    pp: int
    dp: int
    tp: int
    spans: tuple[Span, ...]

    @property
    def stages(self) -> list[int]:
        """The stages that the rank holds, in increasing order."""
        return sorted({span.stage for span in self.spans})

    @property
    def work(self) -> list[Span]:
        """The actions that keep the rank busy."""
        return [span for span in self.spans if span.kind in WORK]


@dataclass(frozen=True)
class Recording:
    """One step of all ranks.

    Attributes:
        step: Its number: of training calls before it, since the recorder was registered.
        steps: Numbers of all recorded steps.
        schedule: Name of the schedule.
        stages: Number of stages.
        microbatches: Number of microbatches.
        device: ``"cpu"``, ``"cuda"``...
        clock_error: Milliseconds by which two ranks' clocks may disagree.
        rows: The ranks, pipeline by pipeline (dp, then tp), stages in order.
    """

    step: int
    steps: tuple[int, ...]
    schedule: str
    stages: int
    microbatches: int
    device: str
    clock_error: float
    rows: tuple[Row, ...]

    @property
    def pipelines(self) -> list[list[Row]]:
        """The rows of each pipeline: ranks that pass each other messages."""
        by_place: dict[tuple[int, int], list[Row]] = {}
        for row in self.rows:
            by_place.setdefault((row.dp, row.tp), []).append(row)
        return list(by_place.values())

    @property
    def duration(self) -> float:
        """Milliseconds from the first work of any rank to the last."""
        spans = [span for row in self.rows for span in row.work]
        return max(span.end for span in spans) - min(span.start for span in spans)

    @property
    def bubble(self) -> float:
        """Idle share of the ranks' time between a pipeline's first and last work; 0 to 1."""
        return idle_share([[row.work for row in rows] for rows in self.pipelines])

    @property
    def least_bubble(self) -> float:
        """The same if every action took as long as it did, and messages took no time."""
        return idle_share([replay(rows, self.stages) for rows in self.pipelines])


def idle_share(pipelines: Sequence[Sequence[Sequence[Span]]]) -> float:
    """Return the idle share of all ranks of all pipelines, given their work."""
    busy = whole = 0.0
    for rows in pipelines:
        spans = [span for row in rows for span in row]
        lasted = max(span.end for span in spans) - min(span.start for span in spans)
        whole += lasted * len(rows)
        busy += sum(span.end - span.start for span in spans)
    return 1 - busy / whole if whole else 0.0


def replay(rows: Sequence[Row], stages: int) -> list[list[Span]]:
    """Let the ranks of a pipeline do their recorded work again, each action as soon as it can.

    Args:
        rows: The ranks.
        stages: Number of stages.

    Returns:
        Their work with new times.

    Raises:
        ConfigError: If an action waits for one that was not recorded.
    """
    queues = [list(row.work) for row in rows]
    out: list[list[Span]] = [[] for _ in rows]
    ends: dict[tuple[str, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for queue, done in zip(queues, out, strict=True):
            while queue and all(need in ends for need in _needs(queue[0], stages)):
                span = queue.pop(0)
                free = done[-1].end if done else 0.0
                start = max([free, *(ends[need] for need in _needs(span, stages))])
                done.append(span._replace(start=start, end=start + span.end - span.start))
                ends[_result(span)] = done[-1].end
                moved = True
    if any(queues):
        left = next(queue[0] for queue in queues if queue)
        raise ConfigError(
            f"the recording lacks what {left.stage}{left.kind}{left.microbatch} waited for; record "
            "all ranks of a pipeline."
        )
    return out


def _result(span: Span) -> tuple[str, int, int]:
    kind = "gradient" if span.kind in ("B", "I") else span.kind
    return kind, span.stage, span.microbatch


def _needs(span: Span, stages: int) -> list[tuple[str, int, int]]:
    """Return what other stages must have computed before."""
    if span.kind == "F" and span.stage > 0:
        return [("F", span.stage - 1, span.microbatch)]
    if span.kind in ("B", "I") and span.stage < stages - 1:
        return [("gradient", span.stage + 1, span.microbatch)]
    return []


def load(folder: Path, step: int | None = None) -> Recording:
    """Read one step of a folder that ``TimelineRecorder`` wrote.

    Args:
        folder: The folder.
        step: Number of the step; the last recorded one if ``None``.

    Returns:
        The step.

    Raises:
        ConfigError: If the folder holds no recording, not all of one, or not this step.
    """
    if not folder.is_dir():
        raise ConfigError(f"DIR={str(folder)!r} is no folder; name the dir of a TimelineRecorder.")
    paths = sorted(folder.glob(PATTERN))
    if not paths:
        raise ConfigError(
            f"DIR={str(folder)!r} holds no {PATTERN}; train with TimelineRecorder(dir=...) for at "
            "least skip + steps steps first."
        )
    files = [_read(path) for path in paths]
    _check_whole(folder, [lines[0] for lines in files])
    known = tuple(line["step"] for line in files[0] if "schedule" in line)
    if step is None and known:
        step = known[-1]
    if step is None or step not in known:
        listed = ", ".join(map(str, known)) or "none"
        raise ConfigError(f"step={step} is not recorded in {str(folder)!r}; recorded: {listed}.")
    return _join(files, known, step)


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:  # also bytes that are no text
        raise ConfigError(f"{path} is no timeline: {error}.") from error
    if not lines or not isinstance(lines[0], dict) or lines[0].get("format") != FORMAT:
        raise ConfigError(f"{path} is no timeline; name a folder that TimelineRecorder wrote.")
    if lines[0]["version"] != VERSION:
        raise ConfigError(
            f"{path} has version={lines[0]['version']}, this goose3d reads {VERSION}; draw it with "
            "the version that recorded it."
        )
    return lines


def _check_whole(folder: Path, headers: list[dict[str, Any]]) -> None:
    if len({header["run"] for header in headers}) > 1:
        raise ConfigError(
            f"DIR={str(folder)!r} mixes files of several runs; record into an empty folder."
        )
    missing = sorted(set(range(headers[0]["world"])) - {header["rank"] for header in headers})
    if missing:
        raise ConfigError(
            f"DIR={str(folder)!r} lacks the files of ranks {missing}; wait for the recorded steps "
            "to end, and bring the files of all machines together."
        )


def _join(files: list[list[dict[str, Any]]], known: tuple[int, ...], step: int) -> Recording:
    chosen = [[line for line in lines if line.get("step") == step] for lines in files]
    actions = [[line for line in lines if "kind" in line] for lines in chosen]
    zero = min(line["start"] for lines in actions for line in lines)

    def span(line: dict[str, Any]) -> Span:
        start, end = ((line[name] - zero) / 1e6 for name in ("start", "end"))
        return Span(line["kind"], line["stage"], line["microbatch"], start, end)

    rows = []
    for (header, *_), lines in zip(files, actions, strict=True):
        place = {name: header[name] for name in ("rank", "pp", "dp", "tp")}
        spans = sorted((span(line) for line in lines), key=lambda one: one.start)
        rows.append(Row(**place, spans=tuple(spans)))
    rows.sort(key=lambda row: (row.dp, row.tp, row.pp))
    about = next(line for line in chosen[0] if "schedule" in line)
    headers = [lines[0] for lines in files]
    return Recording(
        step=step,
        steps=known,
        schedule=about["schedule"],
        stages=about["stages"],
        microbatches=about["microbatches"],
        device=headers[0]["device"],
        # Each clock is compared with rank 0's only.
        clock_error=2 * max(header["clock_error"] for header in headers) / 1e6,
        rows=tuple(rows),
    )
