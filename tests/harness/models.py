"""Tiny causal language models and awkward batches, equal on every rank that asks for them.

transformers' own test models start with unit norm weights and zero biases, which hide whole
classes of errors (a norm gradient that is not reduced, a bias added on every rank). Here every
parameter is random.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

Family = Literal[
    "bloom",
    "falcon",
    "gemma",
    "gpt2",
    "gpt_neox",
    "llama",
    "mistral",
    "mixtral",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
]
Batch = dict[str, Tensor]

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "bloom": (BloomConfig, BloomForCausalLM),
    "falcon": (FalconConfig, FalconForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "opt": (OPTConfig, OPTForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

# A prime: no tensor-parallel size divides it.
VOCAB = 97
IGNORED = -100


class _WideNorm(nn.Module):
    """RMSNorm in the input's own precision.

    transformers computes it in fp32 even for fp64 inputs. Two runs whose sums differ in the last
    bit of fp64 then round differently to fp32, and the comparison ends at 1e-8, not at 1e-14.
    """

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        variance = wide.pow(2).mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * normed.to(hidden_states.dtype)


class _WideGemmaNorm(GemmaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x) * (1.0 + self.weight)


class _WideRouter(MixtralTopKRouter):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        values, chosen = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, values / values.sum(dim=-1, keepdim=True), chosen


_WIDE = {
    norm: type(f"_Wide{norm.__name__}", (_WideNorm, norm), {})
    for norm in (
        LlamaRMSNorm,
        MistralRMSNorm,
        MixtralRMSNorm,
        Phi3RMSNorm,
        Qwen2RMSNorm,
        Qwen3RMSNorm,
    )
} | {GemmaRMSNorm: _WideGemmaNorm, MixtralTopKRouter: _WideRouter}


class _WideFunctional:
    """``torch.nn.functional`` with a softmax that is never narrower than its input."""

    def __getattr__(self, name: str) -> Any:
        return getattr(functional, name)

    def softmax(self, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        wide = None if dtype is None else torch.promote_types(dtype, x.dtype)
        return functional.softmax(x, dim=dim, dtype=wide)


# They take the softmax of attention in fp32, whatever the model's precision.
modeling_bloom.F = _WideFunctional()
modeling_falcon.F = _WideFunctional()


# What a family calls the sizes of `tiny_config`, and what it needs besides.
_NAMES: dict[str, dict[str, str]] = {
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "falcon": {"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"},
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    "opt": {"intermediate_size": "ffn_dim"},
}
_WITHOUT: dict[str, set[str]] = {
    "bloom": {"num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"},
    "falcon": {"head_dim"},
    "gpt2": {"num_key_value_heads", "head_dim"},
    "gpt_neox": {"num_key_value_heads", "head_dim"},
    "opt": {"num_key_value_heads", "head_dim"},
    "phi3": {"head_dim"},
}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bloom": {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attn_implementation": "eager",
    },
    "falcon": {"new_decoder_architecture": True, "bias": True},
    "gpt2": {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        # The grouped matrix product knows no fp64.
        "experts_implementation": "eager",
    },
    "opt": {"word_embed_proj_dim": 24, "dropout": 0.0, "attention_dropout": 0.0},
    "phi3": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
}


def tiny_config(
    family: Family,
    *,
    tied: bool = False,
    layers: int = 4,
    vocab: int = VOCAB,
    heads: int = 4,
    kv_heads: int = 2,
    **overrides: Any,
) -> PreTrainedConfig:
    """Return a config of ``heads * 8`` hidden channels; ``overrides`` go to the config class."""
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": heads * 8,
        "intermediate_size": heads * 12,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    config_class, _ = FAMILIES[family]
    names, without = _NAMES.get(family, {}), _WITHOUT.get(family, set())
    named = {names.get(key, key): v for key, v in settings.items() if key not in without}
    return config_class(**{**named, **_SPECIAL.get(family, {}), **overrides})


def tiny_model(
    family: Family,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **settings: Any,
) -> PreTrainedModel:
    """Build a tiny model in training mode with every parameter random.

    Args:
        family: A key of ``FAMILIES``.
        tied: Whether the head shares the embedding's weight.
        dtype: Of parameters and buffers; norms compute in fp64 if it is fp64.
        seed: Of the parameters; the global generators are left as they were.
        **settings: Further arguments of :func:`tiny_config`, such as ``layers``, ``heads``,
            ``kv_heads``, ``vocab`` or any name the config class knows (``attention_bias=True``).

    Returns:
        The same model on every rank.
    """
    config = tiny_config(family, tied=tied, **settings)
    _, model_class = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(dtype)
    for module in model.modules():
        if type(module) in _WIDE:
            module.__class__ = _WIDE[type(module)]
    randomise(model, seed=seed)
    return model.train()


@torch.no_grad()
def randomise(model: nn.Module, *, seed: int = 0) -> None:
    """Draw every parameter anew, in fp64, so that models of all dtypes start alike."""
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        draw = torch.randn(param.shape, dtype=torch.float64, generator=generator)
        if param.dim() > 1:
            param.copy_(draw * (0.7 / param.shape[-1] ** 0.5))
        else:
            param.copy_(0.1 * draw + (0.0 if name.endswith("bias") else 1.0))


def batches(
    number: int,
    *,
    batch_size: int = 4,
    seq_len: int = 12,
    vocab: int = VOCAB,
    padded: bool = True,
    seed: int = 0,
) -> list[Batch]:
    """Return global batches with right padding and unevenly many ignored labels per row.

    Args:
        number: How many.
        batch_size: Rows in each, over all data-parallel ranks.
        seq_len: Length; the first row is never padded.
        vocab: Ids are in ``[3, vocab)``; 0 pads.
        padded: Whether rows end at different lengths (and have an ``attention_mask``).
        seed: Of the draws.

    Returns:
        Dicts of ``input_ids``, ``labels`` and, if padded, ``attention_mask``, all int64
        ``[batch_size, seq_len]``.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    return [
        _batch(generator, (batch_size, seq_len), vocab=vocab, padded=padded) for _ in range(number)
    ]


def _batch(generator: torch.Generator, size: tuple[int, int], *, vocab: int, padded: bool) -> Batch:
    rows, seq_len = size
    input_ids = torch.randint(3, vocab, size, generator=generator)
    labels = input_ids.clone()
    # Row r keeps about 1 / (1 + r % 3) of its labels: denominators differ between ranks.
    keep = torch.rand(size, generator=generator) < 1.0 / (1 + torch.arange(rows)[:, None] % 3)
    # No row is without any label.
    keep[:, 1] = True
    labels[~keep] = IGNORED
    if not padded:
        return {"input_ids": input_ids, "labels": labels}
    lengths = torch.randint(max(2, seq_len // 2), seq_len + 1, (rows,), generator=generator)
    lengths[0] = seq_len
    mask = (torch.arange(seq_len)[None, :] < lengths[:, None]).long()
    input_ids[mask == 0] = 0
    labels[mask == 0] = IGNORED
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def rows_of(batch: Batch, dp_rank: int, dp_size: int) -> Batch:
    """Return the rows of a global batch that belong to one data-parallel rank."""
    return {name: tensor.chunk(dp_size)[dp_rank] for name, tensor in batch.items()}


def microbatches_of(batch: Batch, number: int) -> Iterator[Batch]:
    """Yield a batch in ``number`` pieces along its first dimension."""
    for index in range(number):
        yield rows_of(batch, index, number)
