"""The report is right on made-up runs: ratios within a round, in alternating order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from goose_strategy.bench import step, world
from goose_strategy.bench.job import Job
from goose_strategy.errors import ConfigError

RECIPE = """\
model: {class_path: a.B}
data: {class_path: a.C}
trainer:
  devices: 8
  strategy:
    class_path: goose_strategy.Goose3DStrategy
    init_args: {tp: 2, pp: 2, timeout: "0:05:00", pipeline: {schedule: GPipe}}
"""


def made_up(ms: float, losses: list[float] | None = None) -> world.Run:
    return world.Run(
        step_ms=[ms, ms + 1, ms - 1],
        cpu_s=[0.5] * 3,
        losses=losses or [3.0, 2.0],
        peak_mib=100.0,
        tokens=2000,
    )


def job_of(*arguments: str) -> Job:
    return step.make_job(step.parser().parse_args(arguments))


def test_ratios_are_taken_within_a_round() -> None:
    # The machine slows down threefold in the second round: a ratio over all runs would be wrong.
    rounds = [
        {"single": made_up(100), "ddp": made_up(80), "goose3d": made_up(50)},
        {"single": made_up(300), "ddp": made_up(250), "goose3d": made_up(180)},
        {"single": made_up(100), "ddp": made_up(100), "goose3d": made_up(55)},
    ]
    report = step.summarise(rounds, Job())
    assert report["over_single_rounds"] == pytest.approx([0.5, 0.6, 0.55])
    assert report["over_single"] == pytest.approx(0.55)
    assert report["over_ddp"] == pytest.approx(0.625)
    assert report["goose3d"]["step_ms"] == 55
    assert report["goose3d"]["step_ms_min"] == 49
    assert report["goose3d"]["tokens_per_s"] == pytest.approx(2000 / 0.055)


def test_a_disagreeing_loss_is_told() -> None:
    wrong = made_up(50, [3.0, 2.5])
    rounds = [{"single": made_up(100), "ddp": made_up(80), "goose3d": wrong}]
    report = step.summarise(rounds, Job())
    assert report["goose3d"]["loss_off"] == pytest.approx(0.5)
    assert report["ddp"]["loss_off"] == 0


def test_the_order_alternates_and_single_has_one_process() -> None:
    seen: list[tuple[str, int]] = []

    def run(job: Job, *, timeout_s: float) -> world.Run:
        assert timeout_s == 9
        seen.append((job.contender, job.devices))
        return made_up(1)

    step.measure(Job(devices=4), 2, 9, run=run)
    assert seen == [
        ("single", 1),
        ("ddp", 4),
        ("goose3d", 4),
        ("goose3d", 4),
        ("ddp", 4),
        ("single", 1),
    ]


def test_the_built_in_work_has_its_own_layout() -> None:
    job = job_of()
    assert (job.devices, job.strategy, job.replicas) == (4, {"pp": 2}, 2)
    job = job_of("--devices=8", "--tp=2", "--microbatches=4")
    assert job.strategy == {"pp": 2, "tp": 2, "pipeline": {"num_microbatches": 4}}
    assert job.replicas == 2


def test_options_win_over_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    job = job_of(f"--config={recipe}")
    assert job.strategy == {"tp": 2, "pp": 2, "pipeline": {"schedule": "GPipe"}}
    assert (job.devices, job.replicas) == (8, 2)
    job = job_of(f"--config={recipe}", "--devices=4", "--tp=1", "--microbatches=6")
    assert job.strategy["pipeline"] == {"schedule": "GPipe", "num_microbatches": 6}
    assert (job.strategy["tp"], job.replicas) == (1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices=3"], "devices=3 is no multiple of tp \\* pp = 1 \\* 2.*multiple of 2"),
        (["--tp=-1"], "tp=-1"),
        (["--steps=0"], "steps=0"),
        (["--config=nothing.yaml"], "does not exist"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(
    arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        job_of(*arguments)


def test_the_last_line_is_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(job: Job, *, timeout_s: float) -> world.Run:
        return made_up({"single": 100, "ddp": 80, "goose3d": 60}[job.contender])

    monkeypatch.setattr(step.measure, "__kwdefaults__", {"run": run})
    assert step.main(["--rounds=1"]) == 0
    table, _, line = capsys.readouterr().out.rstrip().rpartition("\n")
    report: dict[str, Any] = json.loads(line)
    assert report["over_single"] == pytest.approx(0.6)
    assert report["layout"] == {"tp": 1, "pp": 2, "dp": 2, "devices": 4}
    assert "over_single 0.60" in table
    assert "goose3d" in table
    assert step.main(["--rounds=1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
