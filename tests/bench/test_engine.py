"""The report is right on made-up steps, and a short real run has its shape; never its speed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from goose_strategy.bench import engine, world
from goose_strategy.bench.engine_worker import CASES
from goose_strategy.bench.job import EngineJob
from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE


def jobs_of(*arguments: str) -> list[EngineJob]:
    return engine.make_jobs(engine.parser().parse_args(arguments))


def step(start: float, end: float, cpu: float) -> dict[str, float]:
    return {"start": start, "end": end, "cpu": cpu}


def made_up(job: EngineJob, *, timeout_s: float) -> list[dict[str, Any]]:
    """Ranks whose fastest step takes 891 ms under goose3d and 972 ms under torch."""
    assert timeout_s == 600
    first = {
        # The second step is the fastest: of the ranks, one starts first and the other ends last.
        "ours": [step(1.0, 1.9, 0.016), step(3.0, 3.85, 0.008)],
        "torch": [step(2.0, 2.9, 0.032), step(4.0, 4.9, 0.040)],
    }
    last = {
        "ours": [step(1.1, 2.0, 0.016), step(3.01, 3.891, 0.024)],
        "torch": [step(2.1, 2.972, 0.064), step(4.1, 5.1, 0.064)],
    }
    ranks = [first] + [last] * (job.devices - 1)
    alone = [{"ours": rank["ours"]} for rank in ranks]
    return [
        {
            "cases": dict.fromkeys(CASES, rank) | {"1F1B recompute": only, "VMin": only},
            "shared_memory": job.shared_memory,
        }
        for rank, only in zip(ranks, alone, strict=True)
    ]


def test_the_bound_is_the_schedules_own() -> None:
    for stages, microbatches in ((2, 8), (4, 8), (4, 5)):
        job = EngineJob(devices=stages, microbatches=microbatches)
        expected = (microbatches + stages - 1) * 90
        assert engine.bound_ms("GPipe", job) == pytest.approx(expected)
        assert engine.bound_ms("1F1B", job) == pytest.approx(expected)
    # The first of two stages computes 8 forwards twice, and 8 backwards, without a pause but for
    # that before its first gradient: F0 F1 R0 take 90 ms, and the gradient comes after 120 ms.
    assert engine.bound_ms("1F1B recompute", EngineJob(devices=2)) == pytest.approx(8 * 120 + 30)


def test_the_fastest_step_counts() -> None:
    line = engine.read_line("GPipe", made_up(EngineJob(devices=2), timeout_s=600), jobs_of()[0])
    assert (line.case, line.ranks) == ("GPipe", 2)
    assert line.bound_ms == pytest.approx(810)
    assert line.ours.wall_ms == pytest.approx(891)
    assert line.ratio == pytest.approx(1.1)
    assert line.torch is not None
    assert line.torch.wall_ms == pytest.approx(972)
    # The mean of the ranks, in the step that used the least, per microbatch.
    assert line.ours.cpu_ms == pytest.approx(2.0)
    assert line.torch.cpu_ms == pytest.approx(6.0)


def test_the_last_line_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine.measure, "__kwdefaults__", {"run": made_up})
    assert engine.main([]) == 0
    table, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
    found = json.loads(line)
    assert found["GPipe"] == found["1F1B"] == {"p2": 1.1, "p4": 0.9}
    assert found["1F1B recompute"].keys() == {"p2", "p4"}
    assert re.search(r"GPipe +2 +1 +891\.0 +810 +1\.100 +1\.200 +891 +2\.00 +6\.00", table)
    assert re.search(r"1F1B recompute +2 +1 .* - +891 +2\.00 +-", table)
    assert re.search(r"ZBVZeroBubble +2 +2 +891\.0 +\d+ .* 446 ", table)
    assert "ours sends through shared memory" in table
    assert engine.main(["--json", "--no-shared-memory"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_gloo_is_told_where_any_rank_used_it() -> None:
    jobs = [EngineJob(devices=2), EngineJob(devices=4, shared_memory=False)]
    report = engine.measure(jobs, 600, run=made_up)
    assert not report.shared_memory
    assert "ours sends through gloo" in engine.table(report, jobs[0])
    assert len(report.load) == 3


def test_options_make_the_jobs() -> None:
    assert jobs_of() == [EngineJob(devices=2), EngineJob(devices=4)]
    jobs = jobs_of("--ranks", "3", "2", "3", "--steps=1", "--no-shared-memory")
    assert [job.devices for job in jobs] == [3, 2]
    assert jobs[0].steps == 1
    assert not jobs[0].shared_memory


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "ranks=1 must be at least 2"),
        (["--steps=0"], "steps=0"),
        (["--warmup=0"], "warmup=0"),
        (["--timeout=0"], "timeout=0"),
        (["--microbatches=3"], "microbatches=3 is less than ranks=4.*microbatches >= 4"),
        (["--steps=many"], "invalid int value: 'many'; see goose3d bench engine --help"),
        (["--rounds=2"], "unrecognized arguments: --rounds=2"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    def run(*_: Any, **__: Any) -> list[dict[str, Any]]:
        raise AssertionError

    monkeypatch.setattr(engine.measure, "__kwdefaults__", {"run": run})
    with pytest.raises(ConfigError, match=message):
        engine.main(arguments)


@pytest.mark.timeout(180)
def test_a_short_run_has_the_shape() -> None:
    job = EngineJob(devices=2, microbatches=2, steps=1, forward_s=0.002)
    report = engine.measure([job], 150, run=world.run_engine)
    assert {name: set(found) for name, found in engine.ratios(report).items()} == {
        name: {"p2"} for name in CASES
    }
    # Nothing can be faster than its bound, which is made of sleeps.
    assert all(line.ratio >= 1 for line in report.lines)
    compared = [line.case for line in report.lines if line.torch is not None]
    # Torch's DualPipeV wants four microbatches here.
    assert compared == [*list(CATALOGUE)[:7]]
    assert all(line.torch.wall_ms >= line.bound_ms for line in report.lines if line.torch)
