"""Checkpoints as they lie on the hub: written by transformers, with every weight random."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.models.auto import AutoModelForCausalLM

from goose_strategy.errors import GooseError
from tests.harness.models import VOCAB, randomise

_LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2_SIZES: dict[str, Any] = {
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}

CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": lambda **more: LlamaConfig(**{**_LLAMA_SIZES, **more}),
    "qwen3": lambda **more: Qwen3Config(**{**_LLAMA_SIZES, **more}),
    "mixtral": lambda **more: MixtralConfig(**{**_LLAMA_SIZES, "num_local_experts": 4, **more}),
    "phi3": lambda **more: Phi3Config(**{**_LLAMA_SIZES, **more}),
    "gpt2": lambda **more: GPT2Config(**{**_SMALL, **_GPT2_SIZES, **more}),
    "bloom": lambda **more: BloomConfig(**{**_SMALL, "n_layer": 4, "n_head": 4, **more}),
    "opt": lambda **more: OPTConfig(
        **{
            **_SMALL,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "dropout": 0.0,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            **more,
        }
    ),
}


def hub_model(family: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Build a model with random weights; a bias or norm that is misplaced shows."""
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**settings), dtype=dtype)
    randomise(model)
    return model.eval()


def save(
    path: Path, family: str, *, dtype: torch.dtype = torch.float32, shard: str = "5GB", **more: Any
) -> Path:
    """Write the checkpoint of :func:`hub_model` as transformers does."""
    hub_model(family, dtype=dtype, **more).save_pretrained(path, max_shard_size=shard)
    return path


def keys_of(folder: Path) -> set[str]:
    """Return the keys in all safetensors files of a folder."""
    found: set[str] = set()
    for file in folder.glob("*.safetensors"):
        found |= header_of(file).keys() - {"__metadata__"}
    return found


def header_of(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header: dict[str, Any] = json.loads(raw[8 : 8 + length])
    return header


def truncate(file: Path, missing: int = 1) -> None:
    """Cut bytes off the end of a file."""
    os.truncate(file, file.stat().st_size - missing)


def box_of(whole: Tensor, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    """Return a block of a tensor."""
    for dim, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole


@contextmanager
def refused(kind: type[GooseError], *words: str) -> Iterator[None]:
    """Check that the block raises ``kind`` with all of ``words`` in its message."""
    with pytest.raises(kind) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Return all parameters, under all their names."""
    return dict(module.named_parameters(remove_duplicate=False))
