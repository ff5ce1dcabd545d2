"""Settings of the buckets."""

from __future__ import annotations

import pytest

from goose_strategy.data_parallel.config import ZeroConfig
from goose_strategy.errors import ConfigError


def test_defaults_are_valid() -> None:
    config = ZeroConfig()
    assert config.bucket_numel > 0
    assert config.overlap_reduce


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1"])
def test_a_bucket_holds_a_whole_number_of_elements(value: object) -> None:
    with pytest.raises(ConfigError, match="bucket_numel="):
        ZeroConfig(bucket_numel=value)
