"""Llama: grouped-query attention and a gated MLP, with biases where the config asks for them."""

from goose_strategy.models.family import Family

LLAMA = Family(
    name="llama",
    islands={"layers.*.self_attn": "hidden_states", "layers.*.mlp": "x"},
)
