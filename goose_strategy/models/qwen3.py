"""Qwen3: Llama's layers with a norm on each head's query and key.

The norms' weights are shared by all heads, of which a rank has some: their gradients are partial.
"""

from goose_strategy.models.family import LLAMA_ISLANDS, Family
from goose_strategy.tensor_parallel.plan import Style

QWEN3 = Family(
    name="qwen3",
    islands=LLAMA_ISLANDS,
    rules={
        "layers.*.self_attn.q_norm": Style.PARTIAL,
        "layers.*.self_attn.k_norm": Style.PARTIAL,
    },
)
