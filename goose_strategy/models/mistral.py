"""Mistral: Llama's layers with a sliding window."""

from goose_strategy.models.family import LLAMA_ISLANDS, Family

MISTRAL = Family(
    name="mistral",
    islands=LLAMA_ISLANDS,
)
