"""Settings of the sharded optimizer, under the name by which users import them."""

from goose_strategy.data_parallel.config import ZeroConfig as ZeroConfig

__all__ = ["ZeroConfig"]
