"""What is known about one model family, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from goose_strategy.tensor_parallel.plan import Style

HEADS_AND_MLP = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes that tp divides in every decoder with grouped-query attention and a plain MLP."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family whose tensor-parallel plan was proved against one process in fp64.

    Names are those inside the base model (``layers.*.mlp``, not ``model.layers.*.mlp``).

    Args:
        name: ``config.model_type``.
        islands: Parent module -> argument that all its column layers read.
        divisible: Sizes of the config that tp has to divide.
        rules: Laid over transformers' own plan, or all there is where it has none.
    """

    name: str
    islands: Mapping[str, str]
    divisible: tuple[str, ...] = HEADS_AND_MLP
    rules: Mapping[str, Style] = field(default_factory=dict)
