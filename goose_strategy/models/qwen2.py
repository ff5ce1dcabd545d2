"""Qwen2: Llama's layers with biases on the query, key and value projections."""

from goose_strategy.models.family import Family

QWEN2 = Family(
    name="qwen2",
    islands={"layers.*.self_attn": "hidden_states", "layers.*.mlp": "x"},
)
