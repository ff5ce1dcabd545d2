"""A tiny model of (nearly) every causal language model class that transformers has.

A config is made small by the usual names of its sizes; classes whose sizes have to go together in
their own way are named in ``SPECIAL``. Every parameter is random and dropout is off.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from goose_strategy.compat.transformers import install_loss, is_causal_lm
from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.probe import call_settings
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from goose_strategy.tensor_parallel.head import causal_lm_loss
from tests.harness.models import batches, randomise

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
    "dots3_note": {"num_key_value_heads": _HEADS},
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


def causal_classes() -> list[str]:
    """Names of all classes of the mapping; none is imported for it."""
    found: dict[str, None] = {}
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        found.update(dict.fromkeys(names if isinstance(names, (tuple, list)) else (names,)))
    return list(found)


def zoo_model(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny model of the class ``name`` with random parameters, in training mode.

    Raises whatever its class raises where these sizes do not fit it.
    """
    model_class: Any = getattr(transformers, name)
    config = tiny_config(model_class.config_class)
    with torch.device("meta"):
        size = sum(param.numel() for param in model_class(config).parameters())
    if size > _LARGEST:
        raise ValueError(f"{name} is not tiny: {size:,} parameters")
    torch.manual_seed(0)
    model: nn.Module = model_class(config).to(dtype)
    with torch.no_grad():
        randomise(model)
    return model.train()


def tiny_config(config_class: Any, depth: int = 0) -> Any:
    """A small config of a class, with small configs inside."""
    if not dataclasses.is_dataclass(config_class):
        raise TypeError(f"{config_class.__name__} says nothing of its fields")
    fields = {field.name for field in dataclasses.fields(config_class)}
    settings = {name: value for name, value in {**SIZES, **IS_DECODER}.items() if name in fields}
    if "kv_lora_rank" in settings and "num_key_value_heads" in settings:
        # Latent attention has one key head for each query head.
        settings["num_key_value_heads"] = _HEADS
    inner = getattr(config_class, "sub_configs_defaults", None) or {}
    for name, kind in inner.items() if depth < 2 else ():
        sub = kind if isinstance(kind, type) else getattr(kind, "config_class", None)
        default = getattr(kind, "default_model_type", None)
        sub = CONFIG_MAPPING[default] if sub is None and default else sub
        if isinstance(sub, type):
            settings[name] = tiny_config(sub, depth + 1)
    config = config_class(
        **{**settings, **SPECIAL.get(getattr(config_class, "model_type", ""), {})}
    )
    for name, value in vars(config).items():
        if isinstance(value, float) and ("drop" in name or name.endswith("jitter_noise")):
            setattr(config, name, 0.0)
    return config


def run_alone(name: str, *, wide: bool) -> None:
    """Run a tiny model of a class in this process, without any of this package."""
    model = zoo_model(name, torch.float64 if wide else torch.float32)
    (batch,) = _data(model, 1)
    loss = model(**batch, **call_settings(model)).loss
    loss.backward()
    if not math.isfinite(float(loss.detach())):
        # Nothing can be compared with that (ProphetNet's, for padded rows in fp64).
        raise ArithmeticError(f"the loss of one process is {float(loss.detach())}")


def _data(model: nn.Module, number: int) -> list[dict[str, Tensor]]:
    """Batches with padding and ignored labels, without what the model does not take."""
    takes = inspect.signature(model.forward).parameters
    found = batches(number, seq_len=10)
    return [{key: value for key, value in batch.items() if key in takes} for batch in found]


class Outcome(NamedTuple):
    """How a model of the zoo trained over several ranks.

    Attributes:
        refused: The refusal, or ``""``.
        error: Largest relative error of a gradient, and of the loss, as this rank sees it.
        worst: Where it is.
        parameters: Largest relative error of a parameter after the steps.
    """

    refused: str
    error: float = 0.0
    worst: str = ""
    parameters: float = 0.0


def compare(name: str, tp: int, pp: int = 1, *, wide: bool = True, steps: int = 1) -> Outcome:
    """Train a model over this world and in this process alone; collective.

    Args:
        name: Its class.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        wide: In fp64, else in fp32.
        steps: Steps of SGD after which parameters are compared.
    """
    model: Any = zoo_model(name, torch.float64 if wide else torch.float32)
    alone = copy.deepcopy(model)
    data = _data(model, steps)
    settings = call_settings(model)
    # The same loss as ours where it can be replaced: transformers' is taken from fp32 logits.
    if is_causal_lm(alone):
        install_loss(alone, causal_lm_loss(None))
    runtime = ParallelRuntime(
        RuntimeConfig(tp=tp, pp=pp, pipeline=PipelineConfig(num_microbatches=2))
    )
    runtime.start(torch.device("cpu"))
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        handle = runtime.shard_module(model, optimizers=[optimizer])
    except PlanError as error:
        runtime.stop()
        return Outcome(str(error))
    try:
        errors: dict[str, float] = {}
        single = torch.optim.SGD(alone.parameters(), lr=0.05)
        for batch in data:
            loss = model(**batch, **settings).loss
            with runtime.backward(loss):
                loss.backward()
            expected = alone(**batch, **settings).loss
            expected.backward()
            errors["loss"] = max(errors.get("loss", 0.0), _off(loss.detach(), expected.detach()))
            for key, value in _gradient_errors(handle, alone).items():
                errors[key] = max(errors.get(key, 0.0), value)
            for one in (optimizer, single):
                one.step()
                one.zero_grad()
        worst = max(errors, key=lambda key: errors[key])
        specs, named = handle.surgery.specs, dict(alone.named_parameters(remove_duplicate=False))
        after = max(
            _pieces_off(specs[key], param.detach(), named[key].detach(), 1e-6)
            for key, param in model.named_parameters()
            if param.numel()
        )
        return Outcome("", errors[worst], worst, after)
    finally:
        runtime.stop()


def _gradient_errors(handle: Any, alone: nn.Module) -> dict[str, float]:
    expected = {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in alone.named_parameters(remove_duplicate=False)
    }
    # What is rounding in one process is rounding here.
    floor = 1e-4 * max(float(grad.norm()) for grad in expected.values())
    specs = handle.surgery.specs
    found = handle.reducer.full_gradients().items()
    assert found, "no gradients: nothing is compared"
    return {name: _pieces_off(specs[name], grad, expected[name], floor) for name, grad in found}


def _pieces_off(spec: Any, mine: Tensor, theirs: Tensor, floor: float) -> float:
    """The distance of this rank's part of a tensor, relative to the whole."""
    distance = 0.0
    for box, piece in spec.pieces(mine):
        part = theirs
        for dim, (start, length) in enumerate(zip(*box, strict=True)):
            part = part.narrow(dim, start, length)
        distance += float((part - piece).double().square().sum())
    error = distance**0.5 / max(float(theirs.double().norm()), floor, 1e-30)
    return error if math.isfinite(error) else math.inf


def _off(mine: Tensor, theirs: Tensor) -> float:
    error = abs(float(mine) - float(theirs)) / max(abs(float(theirs)), 1e-30)
    return error if math.isfinite(error) else math.inf
