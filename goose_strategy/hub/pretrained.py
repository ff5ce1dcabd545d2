"""``from_pretrained``: the model of a checkpoint, without its weights.

transformers' own reads the whole checkpoint in every process, or shards it by a plan and a mesh of
its own. Here the model is made on the meta device and knows where its tensors lie; when the
strategy has cut it, each rank reads the boxes that it kept.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from goose_strategy.compat.weights import kept_in_fp32, meta_model, remember_transforms
from goose_strategy.errors import ConfigError
from goose_strategy.hub.plan import attach, listed, make_plan
from goose_strategy.hub.source import HubFolder, find_folder
from goose_strategy.hub.unread import guard

if TYPE_CHECKING:
    import os

_CONFIG_FILE = "config.json"
_GENERATION_FILE = "generation_config.json"


def from_pretrained(
    path_or_id: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    **config_kwargs: Any,
) -> Any:
    """Make the causal LM of a checkpoint; its weights are read when the strategy shards it.

    Use it wherever the model is built: before or after the launch, in a LightningModule's
    ``__init__`` or ``configure_model``, as ``fabric.setup(from_pretrained(path), ...)``. Every rank
    then reads its own part, straight from the files. Until then the parameters have names, shapes
    and types, so that they can be frozen, wrapped by adapters and given to an optimizer; what needs
    a value is refused by the parameter's name. Without the strategy, use transformers' own
    ``AutoModelForCausalLM.from_pretrained``.

    Args:
        path_or_id: A folder with ``config.json`` and ``*.safetensors``, or a repository of the hub.
        dtype: Type of the weights: a torch dtype, its name, or ``"auto"`` (and ``None``, as in
            transformers): that of the config, else that of the first weight in the files.
        revision: Branch, tag or commit of a repository.
        **config_kwargs: Settings of the config (``attention_dropout=0.1``) and
            ``attn_implementation``.

    Returns:
        A transformers ``PreTrainedModel`` on the meta device, in evaluation mode as transformers'
        own.

    Raises:
        ConfigError: If there is no such checkpoint, or it is one of pickled files or quantised.
        CheckpointError: If a file is damaged, or does not hold every tensor of the model.
    """
    folder = find_folder(path_or_id, revision=revision)
    config = _config_of(folder, config_kwargs)
    files = HubFolder(folder)
    model: Any = meta_model(config, dtype=_dtype_of(config, files, dtype))
    for name in kept_in_fp32(model, model.config.dtype):
        param = model.get_parameter(name)
        param.data = param.data.to(torch.float32)
    plan, keys = make_plan(model, files)
    remember_transforms(model, keys.used)
    _take_generation_config(model, folder)
    model.name_or_path = model.config.name_or_path = str(folder)
    if plan.unexpected:
        warnings.warn(
            f"'{folder}' holds {len(plan.unexpected)} tensors that {type(model).__name__} does not "
            f"use: {listed(plan.unexpected)}.",
            UserWarning,
            stacklevel=2,
        )
    attach(model, plan)
    guard(plan.parameters)
    return model.eval()


def _config_of(folder: Path, settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    if not (folder / _CONFIG_FILE).is_file():
        raise ConfigError(f"'{folder}' holds no {_CONFIG_FILE}.")
    config, unknown = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **settings)
    if unknown:
        raise ConfigError(
            f"{listed(f'{k}={v!r}' for k, v in unknown.items())}: {type(config).__name__} has no "
            "such setting; from_pretrained takes dtype, revision and settings of the config."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"'{folder}' is a quantised checkpoint, which cannot be trained in parts; use one with "
            "plain weights."
        )
    if getattr(config, "transformers_weights", None) is not None:
        raise ConfigError(
            f"transformers_weights={config.transformers_weights!r} of '{folder}' names other files "
            "than transformers' usual ones, which is not supported; load it with transformers' own "
            "from_pretrained."
        )
    return config


def _dtype_of(config: Any, files: HubFolder, dtype: torch.dtype | str | None) -> torch.dtype:
    """Return the type of the weights, found as transformers finds it."""
    asked = dtype if dtype not in (None, "auto") else getattr(config, "dtype", None)
    if isinstance(asked, str):
        asked = getattr(torch, asked.removeprefix("torch."), asked)
    if asked is None:
        stored = (tensor.dtype for tensor in files.tensors.values())
        asked = next((d for d in stored if d.is_floating_point), torch.get_default_dtype())
    if not isinstance(asked, torch.dtype) or not asked.is_floating_point:
        raise ConfigError(
            f"dtype={dtype!r} must be a floating torch dtype, its name, 'auto' or None."
        )
    return asked


def _take_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / _GENERATION_FILE).is_file() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(folder)
