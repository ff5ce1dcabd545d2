"""Qwen2: Llama's layers with biases on the query, key and value projections."""

from goose_strategy.models.family import LLAMA_ISLANDS, Family

QWEN2 = Family(
    name="qwen2",
    islands=LLAMA_ISLANDS,
)
