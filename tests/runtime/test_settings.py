"""Wrong sizes are refused where they are written, with the name and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.runtime.settings import RuntimeConfig


def test_the_default_is_one_rank_per_model() -> None:
    config = RuntimeConfig()
    assert (config.tp, config.pp) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 0}, "tp=0 must be at least 1"),
        ({"pp": -2}, "pp=-2 must be at least 1"),
        ({"tp": 2.0}, r"tp=2\.0 must be a whole number, not float"),
        ({"pp": True}, "pp=True must be a whole number, not bool"),
        (
            {"pp": 2, "pipeline": PipelineConfig(partition=[1, 1, 2])},
            r"partition=\[1, 1, 2\] lists 3 stages but pp=2",
        ),
        (
            {"pp": 2, "pipeline": PipelineConfig(schedule="ZBH1", compile_layers=True)},
            "compile_layers=True does not work with schedule='ZBH1'.*use '1F1B'",
        ),
        ({"pipeline": "ZBH1"}, r"pipeline='ZBH1' must be a PipelineConfig; write pipeline=Pipe"),
        ({"zero": {"preset": "compact"}}, r"zero=\{'preset': 'compact'\} must be a ZeroConfig"),
        ({"tensor": None}, "tensor=None must be a TensorConfig"),
        (
            {"tp": 2, "pipeline": PipelineConfig(recompute="full")},
            "recompute='full'.* pp=1 has no stages; use recompute='layer'",
        ),
    ],
)
def test_wrong_sizes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RuntimeConfig(**settings)


def test_a_listed_partition_fits_its_stages() -> None:
    assert RuntimeConfig(pp=2, pipeline=PipelineConfig(partition=[3, 1])).pp == 2


def test_what_is_decided_later_is_not_checked_before() -> None:
    auto = PipelineConfig(schedule="auto", partition=[1, 1, 1, 1], compile_layers=True)
    assert RuntimeConfig(pp=2, pipeline=auto).pp == 2
    # At pp=1 there is no schedule.
    split = PipelineConfig(schedule="ZBH1", compile_layers=True)
    assert RuntimeConfig(tp=2, pipeline=split).pp == 1
