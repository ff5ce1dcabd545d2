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


def test_known_styles_pass() -> None:
    assert TensorConfig(rules={"a": "column", "b": "row", "c": "partial"}).rules["c"] == "partial"
