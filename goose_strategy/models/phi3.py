"""Phi-3: Llama's layers with query, key and value, and gate and up, in one matrix each.

transformers' own plan gathers both again and cuts the work of the row layers only.
"""

from goose_strategy.models.family import Family
from goose_strategy.tensor_parallel.plan import Attention, Style

PHI3 = Family(
    name="phi3",
    own_plan=True,
    islands={"layers.*.self_attn": "hidden_states", "layers.*.mlp": "hidden_states"},
    rules={
        "layers.*.self_attn.qkv_proj": Style.COLUMN,
        "layers.*.self_attn.o_proj": Style.ROW,
        "layers.*.mlp.gate_up_proj": Style.COLUMN,
        "layers.*.mlp.down_proj": Style.ROW,
    },
    packed={
        "layers.*.self_attn.qkv_proj": (
            "num_attention_heads",
            "num_key_value_heads",
            "num_key_value_heads",
        ),
        "layers.*.mlp.gate_up_proj": ("intermediate_size", "intermediate_size"),
    },
    attention=Attention(
        module="layers.*.self_attn",
        numbers=("num_key_value_heads", "config.num_attention_heads"),
    ),
)
