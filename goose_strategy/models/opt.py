"""OPT: plain attention with biases; its two feed-forward layers lie in the decoder layer itself."""

from goose_strategy.models.family import Family
from goose_strategy.tensor_parallel.plan import Attention, Style

OPT = Family(
    name="opt",
    own_plan=True,
    islands={"decoder.layers.*.self_attn": "hidden_states"},
    divisible=("num_attention_heads", "ffn_dim"),
    rules={
        "decoder.layers.*.self_attn.q_proj": Style.COLUMN,
        "decoder.layers.*.self_attn.k_proj": Style.COLUMN,
        "decoder.layers.*.self_attn.v_proj": Style.COLUMN,
        "decoder.layers.*.self_attn.out_proj": Style.ROW,
        "decoder.layers.*.fc1": Style.COLUMN,
        "decoder.layers.*.fc2": Style.ROW,
    },
    attention=Attention(
        module="decoder.layers.*.self_attn",
        kv_heads="num_attention_heads",
        numbers=("num_heads",),
    ),
)
