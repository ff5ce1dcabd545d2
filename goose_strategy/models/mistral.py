"""Mistral: Llama's layers with a sliding window."""

from goose_strategy.models.family import Family

MISTRAL = Family(
    name="mistral",
    islands={"layers.*.self_attn": "hidden_states", "layers.*.mlp": "x"},
)
