"""Settings are refused before any group exists, in words that say what is allowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.tables.catalogue import make_schedule
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.csv_text import write_csv
from tests.pipeline_parallel.cases import summed_loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "ZBV"}, "schedule='ZBV' is not known; choose one of 'GPipe', '1F1B'"),
        ({"schedule": "zbv"}, "schedule='zbv' is not known; .*'auto', or the path of a .csv file"),
        ({"schedule": 3}, "schedule=3 must be a name or the path"),
        ({"schedule": "none.csv"}, "schedule='none.csv' cannot be read: .*No such file.*1F1B"),
        ({"stages_per_rank": 2}, "stages_per_rank=2 is not possible with schedule='1F1B'; cho.* 1"),
        (
            {"schedule": "Interleaved1F1B", "stages_per_rank": 1},
            "stages_per_rank=1 is not possible with schedule='Interleaved1F1B'; .* >= 2",
        ),
        ({"schedule": "VMin", "stages_per_rank": 3}, "stages_per_rank=3 is not possible"),
        ({"stages_per_rank": 1.0}, "stages_per_rank=1.0 must be a whole number"),
        ({"num_microbatches": 0}, "num_microbatches=0 must be at least 1"),
        ({"num_microbatches": 2.0}, "num_microbatches=2.0 must be a whole number"),
        ({"partition": "even"}, "partition='even' is not known"),
        ({"partition": []}, r"partition=\[\] names no stages; list the number of layers"),
        ({"partition": None}, "partition=None names no stages"),
        ({"partition": 4}, "partition=4 names no stages"),
        ({"partition": [2, 0, 2]}, r"partition=\[2, 0, 2\] leaves stage 1 without a layer"),
        ({"partition": [2, True]}, r"partition\[1\]=True must be a whole number"),
        ({"recompute": "all"}, "recompute='all' is not known; choose one of 'none', 'full', 'l"),
        ({"recompute": []}, r"recompute=\[\] must list names of modules"),
        ({"recompute": ["mlp", ""]}, r"recompute=\['mlp', ''\] must list names of modules"),
        ({"recompute": True}, "recompute=True must list names of modules.* or be one of 'none'"),
        ({"recompute": None}, "recompute=None must list names of modules"),
        ({"recompute": [3]}, r"recompute=\[3\] must list names"),
        ({"example_shape": (4,)}, r"example_shape=\(4,\) must be \(rows, columns\), or None"),
        ({"example_shape": (4, 0)}, "example_shape's columns=0 must be greater than 0"),
        ({"example_shape": (2.0, 8)}, "example_shape's rows=2.0 must be a whole number"),
        ({"memory_limit_bytes": 0, "schedule": "auto"}, "memory_limit_bytes=0 must be greater"),
        ({"memory_limit_bytes": 9}, "memory_limit_bytes=9 is for schedule='auto', but .*='1F1B'"),
        ({"compile_layers": 1.5}, "compile_layers=1.5 must be true, false, or the name of"),
        ({"schedule": "auto", "stages_per_rank": 0}, "stages_per_rank=0 must be greater than 0"),
        ({"loss_fn": 3}, "loss_fn=3 cannot be called"),
        ({"trim_padding": "no"}, "trim_padding='no' must be true or false"),
        ({"return_logits": 1}, "return_logits=1 must be true or false"),
        ({"step_timeout_s": "2m"}, "step_timeout_s='2m' must be greater than 0"),
        ({"step_timeout_s": 0.0}, "step_timeout_s=0.0 must be greater than 0"),
        ({"first_step_timeout_s": -1.0}, "first_step_timeout_s=-1.0 must be greater than 0"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineConfig(**settings)  # type: ignore[arg-type]


def test_the_default_is_two_microbatches_per_stage() -> None:
    assert PipelineConfig().microbatches(4) == 8
    assert PipelineConfig(num_microbatches=3).microbatches(4) == 3


def test_stages_follow_from_the_schedule() -> None:
    assert PipelineConfig().chunks(4) == Chunks(4)
    assert PipelineConfig(schedule="ZBVZeroBubble").chunks(3) == Chunks(3, 2, "v")
    three = PipelineConfig(schedule="Interleaved1F1B", stages_per_rank=3)
    assert three.chunks(2) == Chunks(2, 3)
    assert three.microbatches(2) == 4


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.csv"
    path.write_text(write_csv(make_schedule("ZBVZeroBubble", 2, 5)), encoding="utf-8")
    return str(path)


def test_a_file_says_what_it_is_for(file: str) -> None:
    config = PipelineConfig(schedule=file)
    assert config.chunks(2) == Chunks(2, 2, "v")
    assert config.microbatches(2) == 5
    assert PipelineConfig(
        schedule=file, num_microbatches=5, stages_per_rank=2
    ) == dataclasses.replace(config, num_microbatches=5, stages_per_rank=2)
    with pytest.raises(ConfigError, match=r"num_microbatches=4 does not fit .* 5 microbatches"):
        PipelineConfig(schedule=file, num_microbatches=4)
    with pytest.raises(ConfigError, match=r"stages_per_rank=1 does not fit .* stages_per_rank=2"):
        PipelineConfig(schedule=file, stages_per_rank=1)
    with pytest.raises(ConfigError, match=r"pp=4 does not fit schedule=.*which is for pp=2"):
        config.chunks(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0\n", "1B0 is missing"),
        ("0F0,0R0,0B0\n1F0,1B0\n", "has 0R0; leave R and T out"),
        ("0F0,what\n", "line 1: action='what' is not of the form"),
        ("", "has no actions"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        PipelineConfig(schedule=str(path))


def test_a_command_line_can_set_everything() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(PipelineConfig, "pipeline")
    words = ["--pipeline.partition=[1, 3]", "--pipeline.num_microbatches=4"]
    words += ["--pipeline.recompute=[model.layers.*.mlp, lm_head]"]
    words += [
        "--pipeline.schedule=GPipe",
        "--pipeline.loss_fn=tests.pipeline_parallel.cases.summed_loss",
    ]
    made = parser.instantiate(parser.parse_args(words)).pipeline
    assert made.partition == [1, 3]
    assert made.recompute == ["model.layers.*.mlp", "lm_head"]
    whole = parser.parse_args(["--pipeline.recompute=full"])
    assert parser.instantiate(whole).pipeline.recompute == "full"
    assert made.loss_fn is summed_loss
    measured = ["schedule=auto", "partition=time", "example_shape=[2, 64]", "compile_layers=eager"]
    words = [f"--pipeline.{word}" for word in [*measured, "memory_limit_bytes=1000"]]
    made_auto = parser.instantiate(parser.parse_args(words)).pipeline
    assert tuple(made_auto.example_shape) == (2, 64)
    assert (made_auto.schedule, made_auto.partition) == ("auto", "time")
    assert (made_auto.compile_layers, made_auto.memory_limit_bytes) == ("eager", 1000)
    compiled = parser.parse_args(["--pipeline.compile_layers=true"])
    assert parser.instantiate(compiled).pipeline.compile_layers is True
    assert (made.num_microbatches, made.schedule) == (4, "GPipe")
    default = parser.instantiate(parser.parse_args([])).pipeline
    assert default == PipelineConfig()


def test_a_config_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PipelineConfig().schedule = "GPipe"  # type: ignore[misc]
