"""GPT-2: transposed linear layers, with query, key and value side by side in one matrix."""

from goose_strategy.models.family import Family
from goose_strategy.tensor_parallel.plan import Attention, Style

GPT2 = Family(
    name="gpt2",
    own_plan=True,
    islands={"h.*.attn": "hidden_states", "h.*.mlp": "hidden_states"},
    divisible=("num_attention_heads",),
    rules={
        "h.*.attn.c_attn": Style.COLUMN,
        "h.*.attn.c_proj": Style.ROW,
        "h.*.mlp.c_fc": Style.COLUMN,
        "h.*.mlp.c_proj": Style.ROW,
    },
    packed={"h.*.attn.c_attn": ("num_attention_heads",) * 3},
    attention=Attention(
        module="h.*.attn", kv_heads="num_attention_heads", numbers=("num_heads", "split_size")
    ),
)
