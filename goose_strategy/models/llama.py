"""Llama: grouped-query attention and a gated MLP, with biases where the config asks for them."""

from goose_strategy.models.family import LLAMA_ISLANDS, Family

LLAMA = Family(
    name="llama",
    islands=LLAMA_ISLANDS,
)
