"""Record when every action of some steps began and ended.

torch's profiler records every operator, which slows a step of many small ones by a multiple and
makes files of hundreds of megabytes; microbatches and stages are not in them. Here only actions are
recorded: two marks each, kept as numbers until the recorded steps are over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

from goose_strategy.comm.clock import ClockOffset, clock_offset, read_clock
from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.hooks import PipelineCallback, PipelineEvent, PipelineStep
from goose_strategy.validate import at_least, whole

FORMAT = "goose-timeline"
VERSION = 1
PATTERN = "rank*.jsonl"


class StepRecorder(PipelineCallback):
    """Records some training steps into one file per rank. Registered on all ranks alike.

    A file holds JSON lines: first the rank with its place and clock (``format``, ``rank``, ``pp``,
    ``dp``, ``tp``...), then one line per step (``step``, ``schedule``...), then one per action
    (``step``, ``kind``, ``stage``, ``microbatch``, ``start``, ``end``). Steps are numbered by the
    training calls since the recorder was registered. Times are nanoseconds of rank 0's clock; ranks
    on other machines are off by at most ``clock_error``. Of a send, ``end`` is when this rank knew
    that its tensors may be freed.

    The files are written at the end of the last recorded step, or by `close` before, over those of
    an earlier recording. On a GPU the times are those of the host, at which it launched work.

    Args:
        dir: Folder of the files; made if it does not exist.
        steps: How many training calls are recorded.
        skip: How many are let pass before, as the first ones compile, allocate and connect.

    Raises:
        ConfigError: If a number is wrong, or the folder cannot be one of recordings.
    """

    def __init__(self, dir: str | os.PathLike[str], steps: int = 2, skip: int = 1) -> None:  # noqa: A002  a user's word
        super().__init__()
        whole(steps=steps, skip=skip)
        at_least(1, steps=steps)
        at_least(0, skip=skip)
        self.dir = Path(dir)
        self.steps = steps
        self.skip = skip
        check_folder(self.dir)
        self._seen = 0
        self._recording = False
        self._clock = ClockOffset(0, 0)
        self._run = ""
        self._last: PipelineStep | None = None
        self._lines: list[dict[str, Any]] = []
        self._marks: list[tuple[PipelineEvent, int]] = []

    @property
    def done(self) -> bool:
        """Whether the recorded steps are over, and the file is written."""
        return self._seen >= self.skip + self.steps

    @override
    def before_step(self, step: PipelineStep) -> None:
        if not step.train or self.done:
            return
        if self._seen == 0:
            self._begin(step)
        self._recording = self._seen >= self.skip
        if self._recording:
            self._marks = []
            self._lines.append(
                {
                    "step": self._seen,
                    "schedule": step.schedule,
                    "stages": step.stages,
                    "microbatches": step.microbatches,
                    "start": read_clock(),
                }
            )

    @override
    def after_step(self, step: PipelineStep) -> None:
        if not step.train or self.done:
            return
        self._seen += 1
        if self._recording:
            self._recording = False
            self._lines[-1]["end"] = read_clock()
            self._lines[-1]["actions"] = self._marks
            self._last = step
        if self._seen == self.skip + self.steps:
            self.close()

    def close(self) -> None:
        """Write the steps that are complete, if there are any left to write, and record no more."""
        if self._last is not None:
            self._write(self._last)
        self._seen, self._recording, self._last = self.skip + self.steps, False, None
        self._lines, self._marks = [], []

    def _mark(self, event: PipelineEvent) -> None:
        if self._recording:
            self._marks.append((event, read_clock()))

    before_forward = after_forward = before_backward = after_backward = _mark
    before_weight_gradient = after_weight_gradient = _mark
    before_recompute = after_recompute = _mark
    before_send = after_send = before_receive = after_receive = _mark

    def _begin(self, step: PipelineStep) -> None:
        """Make the folder and compare the clocks, in the first training call."""
        self.dir.mkdir(parents=True, exist_ok=True)
        self._run = f"{time.time_ns()}-{os.getpid()}"
        if step.rank == 0:
            for old in self.dir.glob(PATTERN):
                old.unlink()
        if step.mesh is not None and step.mesh.layout.world_size > 1:
            self._run = all_gather_objects(self._run, step.mesh.control)[0]
            self._clock = clock_offset(step.mesh.control)

    def _write(self, step: PipelineStep) -> None:
        path = self.dir / f"rank{step.rank:05d}.jsonl"
        unfinished = path.with_suffix(".tmp")
        lines = [self._header(step), *self._records()]
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        unfinished.replace(path)

    def _header(self, step: PipelineStep) -> dict[str, Any]:
        mesh = step.mesh
        place = {"pp": step.rank, "dp": 0, "tp": 0}
        if mesh is not None:
            place = {"pp": mesh.pp_rank, "dp": mesh.dp_rank, "tp": mesh.tp_rank}
        return {
            "format": FORMAT,
            "version": VERSION,
            "run": self._run,
            "rank": step.rank,
            "world": step.stages // len(step.held) if mesh is None else mesh.layout.world_size,
            **place,
            "device": "cpu" if mesh is None else mesh.device.type,
            "times": "host",
            "clock_error": self._clock.error_ns,
        }

    def _records(self) -> Iterator[dict[str, Any]]:
        shift = self._clock.offset_ns
        for line in self._lines:
            # Without an end it was broken off.
            if "end" not in line:
                continue
            marks = line.pop("actions")
            yield {**line, "start": line["start"] + shift, "end": line["end"] + shift}
            begun: dict[PipelineEvent, int] = {}
            for event, at in marks:
                start = begun.pop(event, None)
                if start is None:
                    begun[event] = at
                    continue
                yield {
                    "step": line["step"],
                    "kind": event.kind,
                    "stage": event.stage,
                    "microbatch": event.microbatch,
                    "start": start + shift,
                    "end": at + shift,
                }


def check_folder(folder: Path) -> None:
    """Refuse a folder whose files a recording would replace, though they are none.

    Raises:
        ConfigError: If it is a file, or holds ``rank*.jsonl`` files of another kind.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"dir={str(folder)!r} is a file; name a folder for the timeline.")
    for path in sorted(folder.glob(PATTERN)):
        with path.open(encoding="utf-8", errors="replace") as lines:
            first = lines.readline()
        if FORMAT not in first:
            raise ConfigError(
                f"dir={str(folder)!r} holds {path.name}, which is no timeline and would be "
                "replaced; choose another folder."
            )
