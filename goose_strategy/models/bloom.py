"""Bloom: query, key and value of each head side by side, and a bias for each head (alibi)."""

from goose_strategy.models.family import Family
from goose_strategy.tensor_parallel.plan import Attention, Style

BLOOM = Family(
    name="bloom",
    own_plan=True,
    islands={"h.*.self_attention": "hidden_states", "h.*.mlp": "hidden_states"},
    divisible=("num_attention_heads",),
    rules={
        "h.*.self_attention.query_key_value": Style.COLUMN,
        "h.*.self_attention.dense": Style.ROW,
        "h.*.mlp.dense_h_to_4h": Style.COLUMN,
        "h.*.mlp.dense_4h_to_h": Style.ROW,
    },
    attention=Attention(
        module="h.*.self_attention",
        kv_heads="num_attention_heads",
        numbers=("num_heads",),
        sliced=("alibi",),
    ),
    # It multiplies by pieces of the row layers' weights itself.
    refused={"slow_but_exact": True},
)
