"""Settings of the buckets."""

from __future__ import annotations

import re

import jsonargparse
import pytest

from goose_strategy.data_parallel.config import PRESETS, ZeroConfig
from goose_strategy.errors import ConfigError


def test_defaults_are_valid() -> None:
    config = ZeroConfig()
    assert config.bucket_numel > 0
    assert config.overlap_reduce


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_a_bucket_holds_a_whole_number_of_elements(value: object) -> None:
    with pytest.raises(ConfigError, match="bucket_numel="):
        ZeroConfig(bucket_numel=value)


WRONG = [
    ("preset", "fp16"),
    ("main", "bf16+4"),
    ("main", "fp16"),
    ("exp_avg", "int8"),
    ("exp_avg_sq", 8),
    ("grads", "fp16"),
    ("wire", None),
    ("overlap_param_gather", "yes"),
    ("overlap_reduce", 1),
    ("skip_nonfinite", "no"),
    ("max_skipped", 0),
    ("max_skipped", 2.5),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_what_is_not_known_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}")):
        ZeroConfig(**{name: value})


def test_what_was_chosen_is_named() -> None:
    assert ZeroConfig().named == {}
    assert ZeroConfig(preset="compact", main="fp32").named == {"preset": "compact", "main": "fp32"}


def test_every_preset_is_made_of_what_may_be_chosen_alone() -> None:
    for name, (main, exp_avg, exp_avg_sq) in PRESETS.items():
        config = ZeroConfig(preset=name, main=main, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
        assert config.named["preset"] == name


def test_a_command_line_sets_every_field() -> None:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(ZeroConfig, "zero")
    words = ["--zero.preset=compact", "--zero.main=bf16+8", "--zero.exp_avg=8bit"]
    words += ["--zero.exp_avg_sq=bf16", "--zero.grads=bf16", "--zero.overlap_param_gather=true"]
    assert ZeroConfig(**vars(parser.parse_args(words).zero)) == ZeroConfig(
        preset="compact",
        main="bf16+8",
        exp_avg="8bit",
        exp_avg_sq="bf16",
        grads="bf16",
        overlap_param_gather=True,
    )
    with pytest.raises(jsonargparse.ArgumentError, match="wire"):
        parser.parse_args(["--zero.wire=fp8"])
