"""A tiny model of (nearly) every causal language model class that transformers has.

A config is made small by the usual names of its sizes; classes whose sizes have to go together in
their own way are named in ``SPECIAL``. Every parameter is random and dropout is off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.harness.models import randomise

_LARGEST = 20_000_000
_HIDDEN, _WIDE, _LAYERS, _HEADS = 64, 128, 4, 4
_BY_NAMES: Mapping[str, int] = {
    "vocab_size vocab_size_per_layer_input max_position_embeddings n_positions n_ctx max_seq_len "
    "max_target_positions": 128,
    "hidden_size n_embd d_model embed_dim emb_dim dim_model lru_width input_embedding_size "
    "output_embedding_size": _HIDDEN,
    "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dff "
    "feed_forward_size mamba_d_ssm": _WIDE,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers": _LAYERS,
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads": _HEADS,
    "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads": 4,
    "encoder_layers num_key_value_heads num_kv_heads num_experts_per_tok top_k_experts moe_top_k "
    "moe_k moe_topk num_experts_per_token linear_num_key_heads eos_token_id": 2,
    "head_dim kv_lora_rank q_lora_rank v_head_dim qk_head_dim linear_key_head_dim "
    "linear_value_head_dim mamba_d_head hidden_size_per_layer_input attention_head_size": 16,
    "qk_rope_head_dim qk_nope_head_dim state_size mamba_d_state mamba_n_heads rotary_dim": 8,
    "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size": 32,
    "n_shared_experts n_group topk_group first_k_dense_replace bos_token_id mamba_n_groups "
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
}
SIZES = {name: value for names, value in _BY_NAMES.items() for name in names.split()}
_FULL, _CONV = "full_attention", "conv"
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    # One key head for each query head.
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa"), {"num_key_value_heads": _HEADS}
    ),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_moe": {"layer_types": [_CONV, _FULL, _CONV, _FULL], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local"] * _LAYERS},
    "xlm": {"n_langs": 1},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_text": {"num_kv_shared_layers": 0},
}
IS_DECODER = {"is_decoder": True}


def causal_classes() -> dict[str, tuple[str, type[nn.Module]]]:
    """Every class of the mapping by its name, with its ``model_type``; the first one counts."""
    found: dict[str, tuple[str, type[nn.Module]]] = {}
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in names if isinstance(names, (tuple, list)) else (names,):
            if name not in found:
                found[name] = model_type, getattr(transformers, name)
    return found


def zoo_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny model of the class ``name`` with random parameters, in training mode.

    Raises whatever its class raises where these sizes do not fit it.
    """
    model_class: Any = causal_classes()[name][1]
    config = tiny_config(model_class.config_class)
    with torch.device("meta"):
        size = sum(param.numel() for param in model_class(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{name} is not tiny: {size:,} parameters")
    torch.manual_seed(0)
    model: nn.Module = model_class(config).to(dtype)
    randomise(model)
    return model.train()


def tiny_config(config_class: Any, depth: int = 0) -> Any:
    """A small config of a class, with small configs inside."""
    if not dataclasses.is_dataclass(config_class):
        raise TypeError(f"{config_class.__name__} says nothing of its fields")
    fields = {field.name for field in dataclasses.fields(config_class)}
    settings = {name: value for name, value in {**SIZES, **IS_DECODER}.items() if name in fields}
    inner = getattr(config_class, "sub_configs_defaults", None) or {}
    for name, kind in inner.items() if depth < 2 else ():
        sub = kind if isinstance(kind, type) else getattr(kind, "config_class", None)
        default = getattr(kind, "default_model_type", None)
        sub = CONFIG_MAPPING[default] if sub is None and default else sub
        if isinstance(sub, type):
            settings[name] = tiny_config(sub, depth + 1)
    config = config_class(**{**settings, **SPECIAL.get(config_class.model_type, {})})
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or name.endswith("jitter_noise")):
            setattr(config, name, 0.0)
    return config
