"""Settings are refused before any group exists, in words that say what is allowed."""

from __future__ import annotations

import dataclasses

import pytest
from jsonargparse import ArgumentParser

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from tests.pipeline_parallel.cases import summed_loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "ZBV"}, "schedule='ZBV' is not known; choose one of 'GPipe', '1F1B'"),
        ({"num_microbatches": 0}, "num_microbatches=0 must be at least 1"),
        ({"num_microbatches": 2.0}, "num_microbatches=2.0 must be a whole number"),
        ({"partition": "even"}, "partition='even' is not known"),
        ({"partition": []}, r"partition=\[\] is empty"),
        ({"partition": [2, 0, 2]}, r"partition=\[2, 0, 2\] leaves stage 1 without a layer"),
        ({"partition": [2, True]}, r"partition\[1\]=True must be a whole number"),
        ({"recompute": "all"}, "recompute='all' is not known; choose one of 'none', 'full', 'l"),
        ({"recompute": []}, r"recompute=\[\] must list names of modules"),
        ({"recompute": ["mlp", ""]}, r"recompute=\['mlp', ''\] must list names of modules"),
        ({"recompute": [3]}, r"recompute=\[3\] must list names"),
        ({"example_shape": (4,)}, r"example_shape=\(4,\) must be \(rows, columns\), or None"),
        ({"example_shape": (4, 0)}, "example_shape's columns=0 must be greater than 0"),
        ({"example_shape": (2.0, 8)}, "example_shape's rows=2.0 must be a whole number"),
        ({"memory_limit_bytes": 0, "schedule": "auto"}, "memory_limit_bytes=0 must be greater"),
        ({"memory_limit_bytes": 9}, "memory_limit_bytes=9 is for schedule='auto', but .*='1F1B'"),
        ({"compile_layers": 1.5}, "compile_layers=1.5 must be true, false, or the name of"),
        ({"schedule": "auto", "stages_per_rank": 0}, "stages_per_rank=0 must be greater than 0"),
        ({"loss_fn": 3}, "loss_fn=3 cannot be called"),
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
