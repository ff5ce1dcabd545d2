"""A job survives the process border, and takes its settings from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from goose_strategy.bench import job
from goose_strategy.errors import ConfigError

RECIPE = """\
seed_everything: 7
model: {class_path: a.B}
data: {class_path: a.C}
trainer:
  accelerator: cpu
  devices: 8
  precision: bf16-true
  gradient_clip_val: 0.5
  strategy: {class_path: goose_strategy.Goose3DStrategy, init_args: {tp: 2, pp: 2}}
"""


def test_a_job_comes_back_from_json() -> None:
    sent = job.Job(contender="ddp", strategy={"tp": 2, "pipeline": {"partition": [1, 3]}}, clip=1.0)
    assert job.load(sent.dump()) == sent


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"contender": "fsdp"}, "contender='fsdp'"), ({"steps": 0}, "steps=0"), ({"warmup": 0}, "1")],
)
def test_wrong_settings_are_named(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job.Job(**setting)  # type: ignore[arg-type]


def test_a_recipe_says_how_it_trains(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    assert job.settings_of(job.read_recipe(str(path))) == {
        "devices": 8,
        "accelerator": "cpu",
        "precision": "bf16-true",
        "clip": 0.5,
        "seed": 7,
        "strategy": {"tp": 2, "pp": 2},
    }


def test_a_bare_strategy_name_has_no_arguments() -> None:
    assert job.settings_of({"trainer": {"strategy": "goose3d"}}) == {}


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml' does not exist"):
        job.read_recipe(str(tmp_path / "nothing.yaml"))


@pytest.mark.parametrize("text", ["model: {class_path: a.B}", "- a", ""])
def test_a_file_without_model_and_data_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no data"):
        job.read_recipe(str(path))


def test_an_engine_job_comes_back_from_json() -> None:
    sent = job.EngineJob(devices=4, steps=2, forward_s=0.01, shared_memory=False)
    assert job.load_engine(sent.dump()) == sent


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"devices": 1}, "ranks=1 must be at least 2"),
        ({"steps": 0}, "steps=0"),
        ({"warmup": 0}, "warmup=0"),
        ({"microbatches": 2}, "microbatches=2 is less than ranks=3.*choose microbatches >= 3"),
        ({"forward_s": 0.0}, "forward_s=0.0"),
    ],
)
def test_wrong_engine_settings_are_named(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job.EngineJob(**{"devices": 3} | setting)
