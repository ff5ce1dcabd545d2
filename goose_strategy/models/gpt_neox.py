"""GPT-NeoX: query, key and value of each head side by side, attention and MLP in parallel."""

from goose_strategy.models.family import Family
from goose_strategy.tensor_parallel.plan import Attention

GPT_NEOX = Family(
    name="gpt_neox",
    islands={"layers.*.attention": "hidden_states", "layers.*.mlp": "hidden_states"},
    divisible=("num_attention_heads", "intermediate_size"),
    attention=Attention(module="layers.*.attention", kv_heads="num_attention_heads"),
)
