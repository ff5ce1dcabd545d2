"""The settings are found under the name that users import."""

from __future__ import annotations

from goose_strategy.data_parallel import config as data_parallel
from goose_strategy.optim.config import ZeroConfig


def test_it_is_the_same_class() -> None:
    assert ZeroConfig is data_parallel.ZeroConfig
