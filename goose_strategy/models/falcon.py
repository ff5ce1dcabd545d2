"""Falcon: fused query, key and value in three layouts, of which two can be cut by heads.

In the new decoder architecture (40B, 180B) each key head lies beside its queries; in the oldest
(RW) each head has its own, with alibi. The 7B shares one key head at the end of the matrix: its
attention has to stay whole.
"""

from goose_strategy.models.family import Family
from goose_strategy.tensor_parallel.plan import Attention, Style

FALCON = Family(
    name="falcon",
    own_plan=True,
    islands={"h.*.self_attention": "hidden_states", "h.*.mlp": "x"},
    divisible=("num_attention_heads", "num_kv_heads", "ffn_hidden_size"),
    rules={
        "h.*.self_attention.query_key_value": Style.COLUMN,
        "h.*.self_attention.dense": Style.ROW,
        "h.*.mlp.dense_h_to_4h": Style.COLUMN,
        "h.*.mlp.dense_4h_to_h": Style.ROW,
    },
    attention=Attention(
        module="h.*.self_attention",
        kv_heads="num_kv_heads",
        numbers=("num_heads", "num_kv_heads"),
        sliced=("alibi", "attention_mask"),
    ),
    attention_if=({"new_decoder_architecture": True}, {"multi_query": False}),
)
