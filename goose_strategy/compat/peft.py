"""Everything that goose-strategy knows about the inside of peft.

peft is never imported here: where the program has not imported it, no module is one of its layers.
Each function has a test that says what breaks when a name moves (0.21 at the time of writing).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

_TUNERS = "peft.tuners.lora.layer"
_OTHER = "peft.utils.other"


def is_lora_linear(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear layer with low-rank adapters, and plain."""
    return _is_exactly(module, _TUNERS, "Linear")


def is_lora_embedding(module: nn.Module) -> bool:
    """Return whether ``module`` is an embedding with low-rank adapters, and plain."""
    return _is_exactly(module, _TUNERS, "Embedding")


def is_lora(module: nn.Module) -> bool:
    """Return whether ``module`` is a layer with low-rank adapters, cut or not."""
    layer = getattr(sys.modules.get(_TUNERS), "LoraLayer", None)
    return layer is not None and isinstance(module, layer)


def is_saved_copy(module: nn.Module) -> bool:
    """Return whether ``module`` keeps trainable copies of another (``modules_to_save``)."""
    return _is_exactly(module, _OTHER, "ModulesToSaveWrapper")


def is_other_adapter(module: nn.Module) -> bool:
    """Return whether ``module`` is of peft, and none of the three above."""
    ours = is_lora_linear(module) or is_lora_embedding(module) or is_saved_copy(module)
    return type(module).__module__.startswith("peft.") and not ours


def layers_under(module: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that peft has put ``module`` around.

    Returns:
        Name inside ``module`` -> layer: the base layer of an adapter, the original and each
        adapter's copy of a saved module. ``{"": module}`` for any other module.
    """
    if is_lora(module):
        return {"base_layer": module.get_submodule("base_layer")}
    if is_saved_copy(module):
        copies = module.get_submodule("modules_to_save").named_children()
        named = {f"modules_to_save.{adapter}": copy for adapter, copy in copies}
        return {"original_module": module.get_submodule("original_module"), **named}
    return {"": module}


def obstacle_of(module: nn.Module) -> str | None:
    """Return why a layer with adapters computes something else than ``W + s * B @ A``, if so."""
    layer: Any = module
    if layer.lora_variant:
        adapter, variant = next(iter(layer.lora_variant.items()))
        return f"adapter {adapter!r} is a {type(variant).__name__}, not plain LoRA"
    if layer.merged_adapters:
        return f"adapters {layer.merged_adapters} are merged; call unmerge_adapter() first"
    return None


def merge_obstacle(module: nn.Module) -> str | None:
    """Return why a layer's active adapters cannot be written into the layer below, if so."""
    layer: Any = module
    below = {name for name, _ in layer.base_layer.named_parameters()}
    for adapter in active_adapters(module):
        variant = layer.lora_variant.get(adapter)
        if variant is not None:
            return f"adapter {adapter!r} is a {type(variant).__name__}, not plain LoRA"
        if delta_bias(module, adapter) is not None and "bias" not in below:
            return (
                f"adapter {adapter!r} adds a bias (lora_bias=True), which the layer below has not"
            )
        if delta_weight(module, adapter) is not None and "weight" not in below:
            return f"adapter {adapter!r} is on a parameter (target_parameters), not on a layer"
    return None


def linear_adapters(module: nn.Module) -> dict[str, tuple[nn.Linear, nn.Linear]]:
    """Return the factors of a linear layer's adapters, active or not.

    Returns:
        Adapter -> ``A``, ``[r, in]``, and ``B``, ``[out, r]``.
    """
    layer: Any = module
    return {name: (layer.lora_A[name], layer.lora_B[name]) for name in layer.lora_A}


def embedding_adapters(module: nn.Module) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Return the factors of an embedding's adapters: ``A``, ``[r, vocab]``; ``B``, ``[out, r]``."""
    layer: Any = module
    return {
        name: (layer.lora_embedding_A[name], layer.lora_embedding_B[name])
        for name in layer.lora_embedding_A
    }


def adapter_dropouts(module: nn.Module) -> list[nn.Module]:
    """Return what stands between a linear layer's input and its adapters."""
    return list(module.get_submodule("lora_dropout").children())


Lookup = Callable[[Any, Tensor, Tensor], Tensor]
"""Called with the layer, the ids and the table ``[vocab, r]``."""


def replaced_lookup(lookup: Lookup) -> dict[str, Any]:
    """Return the attributes of a subclass of peft's embedding that looks ids up by ``lookup``."""

    def embed(self: Any, input: Tensor, weight: Tensor, *_args: Any, **_kwargs: Any) -> Tensor:  # noqa: A002
        return lookup(self, input, weight)

    return {"_embed": embed}


def delta_weight(module: nn.Module, adapter: str) -> Tensor | None:
    """Return what an adapter adds to the weight of its base layer; ``None`` if it adds nothing.

    Of a layer that tp has cut, the factors that this rank holds give the delta of its part.
    """
    layer: Any = module
    if adapter not in layer.lora_A and adapter not in layer.lora_embedding_A:
        return None
    delta: Tensor = layer.get_delta_weight(adapter)
    return delta


def delta_bias(module: nn.Module, adapter: str) -> Tensor | None:
    """Return what an adapter adds to the bias of its base layer; ``None`` if it adds nothing."""
    layer: Any = module
    if adapter not in layer.lora_A or layer.lora_B[adapter].bias is None:
        return None
    bias: Tensor = layer.lora_B[adapter].bias * layer.scaling[adapter]
    return bias


def active_adapters(module: nn.Module) -> list[str]:
    """Return the adapters that a layer's forward adds."""
    layer: Any = module
    return [] if layer.disable_adapters else list(layer.active_adapters)


def merged_adapters(module: nn.Module) -> list[str]:
    """Return the adapters of a layer that are added to its weights at present."""
    return list(getattr(module, "merged_adapters", []))


def peft_models(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of every ``PeftModel`` in a module tree."""
    models = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if models is None:
        return
    for name, child in module.named_modules():
        if isinstance(child, models):
            yield name, child


def adapter_names(model: nn.Module) -> list[str]:
    """Return the adapters of a ``PeftModel``."""
    peft_model: Any = model
    return list(peft_model.peft_config)


def adapter_state(
    model: nn.Module, state_dict: Mapping[str, Tensor], adapter: str
) -> dict[str, Tensor]:
    """Choose and rename an adapter's tensors as ``PeftModel.from_pretrained`` reads them.

    Args:
        model: The ``PeftModel``; may be cut, only its names and settings are read.
        state_dict: Whole tensors by their name in ``model``.
        adapter: Which adapter.
    """
    chosen: dict[str, Tensor] = sys.modules["peft"].get_peft_model_state_dict(
        model, state_dict=dict(state_dict), adapter_name=adapter, save_embedding_layers=False
    )
    # peft asks the wrapped module for its names, and a stage has none of another stage's.
    place = f"modules_to_save.{adapter}."
    copies = {name.replace(place, ""): t for name, t in state_dict.items() if place in name}
    return chosen | copies


def save_adapter_config(model: nn.Module, adapter: str, folder: str) -> None:
    """Write ``adapter_config.json``, for inference, as ``PeftModel.save_pretrained`` does."""
    peft_model: Any = model
    config = peft_model.peft_config[adapter]
    former = config.inference_mode, config.base_model_name_or_path
    if config.base_model_name_or_path is None:
        base = peft_model.base_model.model
        config.base_model_name_or_path = vars(base).get("name_or_path") or base.name_or_path
    config.inference_mode = True
    try:
        config.save_pretrained(folder)
    finally:
        config.inference_mode, config.base_model_name_or_path = former


def _is_exactly(module: nn.Module, where: str, name: str) -> bool:
    found = getattr(sys.modules.get(where), name, None)
    return found is not None and type(module) is found
