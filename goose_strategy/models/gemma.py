"""Gemma: Llama's layers with scaled embeddings and norms of ``1 + weight``."""

from goose_strategy.models.family import LLAMA_ISLANDS, Family

GEMMA = Family(
    name="gemma",
    islands=LLAMA_ISLANDS,
)
