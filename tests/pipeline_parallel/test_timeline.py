"""The recorder writes every action of the asked steps once, with times, cheaply."""

from __future__ import annotations

import json
import time
import timeit
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from goose_strategy.comm.clock import ClockOffset
from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel import timeline
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.engine import Engine
from goose_strategy.pipeline_parallel.hooks import PipelineHooks, PipelineStep, StepHooks
from goose_strategy.pipeline_parallel.links import connect_stages
from goose_strategy.pipeline_parallel.microbatch import split_batch
from goose_strategy.pipeline_parallel.program import rank_program
from goose_strategy.pipeline_parallel.schedule import Action, Kind
from goose_strategy.pipeline_parallel.timeline import StepRecorder
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.pipeline_parallel.cases import batch_of, model_of
from tests.pipeline_parallel.test_links import make_mesh, make_part
from tests.pipeline_parallel.threads import make_pipeline

NUMBER = 4


def parts() -> list[dict[str, Any]]:
    return split_batch(batch_of(NUMBER), PipelineConfig(num_microbatches=NUMBER), stages=2)


def read(folder: Path, rank: int) -> list[dict[str, Any]]:
    text = (folder / f"rank{rank:05d}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_asked_training_steps_are_recorded(tmp_path: Path) -> None:
    pipeline = make_pipeline(model_of("llama"), 2, config=PipelineConfig(schedule="GPipe"))
    recorders = [StepRecorder(tmp_path / "made", steps=2, skip=1) for _ in pipeline.engines]
    for engine, recorder in zip(pipeline.engines, recorders, strict=True):
        engine.hooks.add(recorder)
    begun = time.perf_counter_ns()
    for train in (True, False, True, True, True, False):
        pipeline.run(parts(), train=train)
    ended = time.perf_counter_ns()
    assert all(recorder.done for recorder in recorders)
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "rank00000.jsonl",
        "rank00001.jsonl",
    ]
    for stage in range(2):
        header, *lines = read(tmp_path / "made", stage)
        assert (header["format"], header["rank"], header["pp"]) == ("goose-timeline", stage, stage)
        assert header["times"] == "host"
        steps = [line for line in lines if "schedule" in line]
        assert [line["step"] for line in steps] == [1, 2]
        assert {line["schedule"] for line in steps} == {"GPipe"}
        row = rank_program("GPipe", 2, NUMBER, train=True, rank=stage).actions
        for step in steps:
            mine = [line for line in lines if line["step"] == step["step"] and "kind" in line]
            told = [Action(one["stage"], Kind(one["kind"]), one["microbatch"]) for one in mine]
            assert Counter(told) == Counter(row)
            for one in mine:
                assert begun < step["start"] <= one["start"] < one["end"] <= step["end"] < ended


def test_what_is_left_is_written_by_close(tmp_path: Path) -> None:
    pipeline = make_pipeline(model_of("llama"), 2)
    recorders = [StepRecorder(tmp_path, steps=5, skip=0) for _ in pipeline.engines]
    for engine, recorder in zip(pipeline.engines, recorders, strict=True):
        engine.hooks.add(recorder)
    pipeline.run(parts(), train=True)
    assert not list(tmp_path.glob("*"))
    for recorder in recorders:
        recorder.close()
    text = (tmp_path / "rank00001.jsonl").read_text(encoding="utf-8")
    pipeline.run(parts(), train=True)
    recorders[1].close()
    assert (tmp_path / "rank00001.jsonl").read_text(encoding="utf-8") == text
    assert len([line for line in read(tmp_path, 1) if "schedule" in line]) == 1


def test_nothing_recorded_writes_nothing(tmp_path: Path) -> None:
    recorder = StepRecorder(tmp_path)
    recorder.close()
    assert recorder.done
    assert not list(tmp_path.glob("*"))


def shifted(ctx: Context) -> list[dict[str, Any]]:
    """Record on ranks whose counters differ by a second each, as on machines of their own."""
    mesh = make_mesh(ctx, ctx.world_size)
    config = PipelineConfig(num_microbatches=NUMBER)
    hooks = PipelineHooks()
    hooks.mesh = mesh
    hooks.add(StepRecorder(ctx.tmp_path, steps=1, skip=1))
    part = make_part("llama", mesh)
    engine = Engine(part, connect_stages(mesh), config, rank=ctx.rank, hooks=hooks)
    shift = ctx.rank * 10**9
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "read_clock", lambda: time.perf_counter_ns() - shift)
        # What `clock_offset` finds is proved beside it; here, that it is used.
        patch.setattr(timeline, "clock_offset", lambda _: ClockOffset(shift, 5 * ctx.rank))
        for _ in range(2):
            engine.run(parts(), train=True)
    lines = read(ctx.tmp_path, ctx.rank)
    mesh.close()
    return lines


def test_times_are_those_of_the_first_rank() -> None:
    """A message is sent before it is taken, on whichever ranks."""
    files = run_ranks(shifted, 4)
    headers = [lines[0] for lines in files]
    assert len({header["run"] for header in headers}) == 1
    assert [header["clock_error"] for header in headers] == [0, 5, 10, 15]
    times = {
        (line["kind"], line["stage"], line["microbatch"]): line
        for lines in files
        for line in lines
        if "kind" in line
    }
    for stage in range(3):
        for microbatch in range(NUMBER):
            sent = times["SEND_F", stage, microbatch]["start"]
            assert sent < times["RECV_F", stage + 1, microbatch]["end"] < sent + 10**9
            sent = times["SEND_B", stage + 1, microbatch]["start"]
            assert sent < times["RECV_B", stage, microbatch]["end"] < sent + 10**9


def test_an_earlier_recording_is_replaced_and_a_foreign_file_refused(tmp_path: Path) -> None:
    (tmp_path / "rank00007.jsonl").write_text('{"format": "goose-timeline"}\n')
    recorder = StepRecorder(tmp_path, steps=1, skip=0)
    recorder.before_step(PipelineStep(0, "1F1B", True, 0, (0,), 2, 1))
    recorder.after_step(PipelineStep(0, "1F1B", True, 0, (0,), 2, 1))
    assert [path.name for path in tmp_path.iterdir()] == ["rank00000.jsonl"]
    (tmp_path / "rank00001.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match=r"holds rank00001.jsonl, which is no timeline"):
        StepRecorder(tmp_path)
    with pytest.raises(ConfigError, match=r"rank00001.jsonl' is a file"):
        StepRecorder(tmp_path / "rank00001.jsonl")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"skip": -1}, "skip=-1 must be at least 0"),
        ({"steps": 1.5}, "steps=1.5 must be a whole number"),
    ],
)
def test_wrong_numbers_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StepRecorder(tmp_path, **settings)


def test_a_mark_costs_less_than_five_microseconds(tmp_path: Path) -> None:
    """Whatever the engine says of a forward, with everything that follows from it."""
    count = 500

    def forwards() -> float:
        recorder = StepRecorder(tmp_path, steps=1, skip=0)
        hooks = PipelineHooks()
        hooks.add(recorder)
        step = StepHooks(hooks._methods, PipelineStep(0, "1F1B", True, 0, 0, 2, count))
        step.open()
        actions = [Action(0, Kind.FORWARD, number) for number in range(count)]
        took = timeit.timeit(lambda: [(step.launch(a), step.finish(a)) for a in actions], number=1)
        return took / count / 2

    assert min(forwards() for _ in range(20)) < 5e-6
