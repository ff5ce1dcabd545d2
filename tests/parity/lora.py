"""Cases of the grid whose model carries low-rank adapters."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import nn

from tests.harness.models import randomise
from tests.parity.grid import Case

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LAYERS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraCase(Case):
    """A case whose model is a ``PeftModel`` with random factors.

    Attributes:
        targets: Names of the layers with adapters.
        adapters: Names of the adapters; the last one is active.
        lora: Further arguments of ``LoraConfig``.
        recompute: Whether layers keep their inputs only, and run again in the backward.
    """

    targets: tuple[str, ...] = LAYERS
    adapters: tuple[str, ...] = ("default",)
    lora: tuple[tuple[str, Any], ...] = ()
    recompute: bool = False

    def model(self) -> nn.Module:
        """Build the model; the base is frozen, and no factor is zero."""
        model: Any = with_adapters(super().model(), self)
        if self.recompute:
            model.base_model.model.enable_input_require_grads()
            model.base_model.model.activation_checkpointing_enable({"use_reentrant": False})
        whole: nn.Module = model
        return whole


def with_adapters(base: nn.Module, case: LoraCase) -> nn.Module:
    """Put adapters around the layers of a plain model, equal in every process."""
    first, *others = case.adapters
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # Of tied weights that get an adapter each, peft says that merging unties them.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        torch.manual_seed(0)
        model: Any = peft.get_peft_model(base, lora_config(case), adapter_name=first)
        for name in others:
            model.add_adapter(name, lora_config(case))
    model.set_adapter(case.adapters[-1])
    adapters = nn.ParameterDict(
        {name.replace(".", "/"): p for name, p in model.named_parameters() if is_adapters(name)}
    )
    randomise(adapters.to(case.dtype), seed=1)
    whole: nn.Module = model.to(case.dtype).train()
    return whole


def lora_config(case: LoraCase) -> peft.LoraConfig:
    """Return the settings of one adapter."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": list(case.targets)}
    settings["fan_in_fan_out"] = case.family == "gpt2"
    further = {key: list(v) if isinstance(v, tuple) else v for key, v in case.lora}
    return peft.LoraConfig(**settings | further, task_type="CAUSAL_LM")


def is_adapters(name: str) -> bool:
    """Return whether a parameter is an adapter's."""
    return "lora_" in name or "modules_to_save" in name
