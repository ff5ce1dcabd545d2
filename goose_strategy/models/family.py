"""What is known about one model family, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from goose_strategy.tensor_parallel.plan import Attention, Style

HEADS_AND_MLP = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes that tp divides in every decoder with grouped-query attention and a plain MLP."""

GROUPED = Attention(module="layers.*.self_attn", key_value=("k_proj", "v_proj"))
"""Llama's attention, which most families share: it reshapes by -1 and repeats key heads."""

LLAMA_ISLANDS = {"layers.*.self_attn": "hidden_states", "layers.*.mlp": "x"}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family whose tensor-parallel plan was proved against one process in fp64.

    Names are those inside the base model (``layers.*.mlp``, not ``model.layers.*.mlp``).

    Args:
        name: ``config.model_type``.
        islands: Parent module -> argument that all its column layers read.
        divisible: Sizes of the config that tp has to divide.
        rules: Laid over transformers' own plan, or all there is where it has none.
        own_plan: Whether ``rules`` stand alone: transformers' plan is missing, or cuts less.
        packed: Column layer that is several matrices side by side -> names of the sizes in the
            config whose ratio their widths have.
        attention: What else has to be known of its attention modules.
        attention_if: Settings of the config, of which one set has to hold, with which attention can
            be cut; it stays whole, if that is allowed, where none does. Empty: always.
        refused: Settings of the config with which the model goes around its own layers.
    """

    name: str
    islands: Mapping[str, str]
    divisible: tuple[str, ...] = HEADS_AND_MLP
    rules: Mapping[str, Style] = field(default_factory=dict)
    own_plan: bool = False
    packed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attention: Attention = GROUPED
    attention_if: tuple[Mapping[str, object], ...] = ()
    refused: Mapping[str, object] = field(default_factory=dict)
