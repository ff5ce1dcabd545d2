from __future__ import annotations

import pytest

from goose_strategy.errors import ConfigError
from goose_strategy.tensor_parallel.config import TensorConfig


def test_defaults() -> None:
    config = TensorConfig()
    assert config.gather_logits is False
    assert config.rules == {}
    assert config.verify_plan
    assert config.deduce_plan


def test_an_unknown_style_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"rules\['mlp.up'\]='diagonal'.*'column', 'row'"):
        TensorConfig(rules={"mlp.up": "diagonal"})


@pytest.mark.parametrize("name", ["gather_logits", "allow_replicated_attention", "verify_plan"])
def test_a_switch_is_no_word(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='no' must be true or false"):
        TensorConfig(**{name: "no"})  # type: ignore[arg-type]


def test_rules_are_a_mapping() -> None:
    with pytest.raises(ConfigError, match=r"rules=\['a'\] must map names of modules to styles"):
        TensorConfig(rules=["a"])  # type: ignore[arg-type]


def test_known_styles_pass() -> None:
    assert TensorConfig(rules={"a": "column", "b": "row", "c": "partial"}).rules["c"] == "partial"
