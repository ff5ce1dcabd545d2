"""Adapters out of a cut model: alone, as peft reads them, or merged into the weights below.

``PeftModel.save_pretrained`` on one rank writes that rank's slices and stage only. Here the pieces
of all ranks are put together first. Merging needs no communication at all: the factors that a rank
holds give exactly the change of the part of the weight that it holds.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from goose_strategy.checkpoint.agree import collect
from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.compat import peft
from goose_strategy.errors import ConfigError
from goose_strategy.runtime.state import model_tensors
from goose_strategy.runtime.verdict import agreed

if TYPE_CHECKING:
    from goose_strategy.checkpoint.manifest import LocalTensor
    from goose_strategy.runtime.model import ShardedModel

WEIGHTS_FILE = "adapter_model.safetensors"
"""peft's name; beside it lies ``adapter_config.json``."""

_BASE, _ORIGINAL, _COPIES = "base_layer.", "original_module.", "modules_to_save."


def export_adapter(
    model: ShardedModel, path: str | os.PathLike[str], *, adapter: str = "default"
) -> None:
    """Write one adapter as ``PeftModel.from_pretrained(base, path)`` loads it. Collective.

    Only the adapter's tensors are gathered, on the host. Rank 0 writes; files of an earlier export
    in the same folder are replaced one by one.

    Args:
        model: A sharded module that holds one ``PeftModel``.
        path: The folder; it is made if need be. Rank 0's counts.
        adapter: Name of the adapter.

    Raises:
        ConfigError: If there is no ``PeftModel`` in it, or no such adapter; on all ranks.
        CheckpointError: If writing failed; on all ranks.
    """
    prefix, peft_model = _peft_model(model)
    known = peft.adapter_names(peft_model)
    if adapter not in known:
        raise ConfigError(f"adapter={adapter!r} is not one of the model's: {', '.join(known)}.")
    folder = Path(os.path.abspath(os.fspath(path)))
    whole = _gathered(model)
    mine = {name.removeprefix(prefix): t for name, t in whole.items() if name.startswith(prefix)}

    def write() -> None:
        if model.mesh.rank == 0:
            _write(folder, peft_model, mine, adapter)

    collect(model.mesh, f"exporting adapter={adapter!r} to path='{folder}'", write)


@contextmanager
def merged_adapters(model: ShardedModel) -> Generator[None, None, None]:
    """Merge the active adapters into the weights below them, inside the block.

    Afterwards the weights are as before to the last bit: they are kept (on the host, for a device
    has no room to spare), not computed back. The merge itself needs no communication.

    Args:
        model: The sharded module.

    Raises:
        ConfigError: If an adapter cannot be merged; on all ranks.
    """
    check_mergeable(model)
    kept: list[tuple[Any, dict[str, Tensor]]] = []
    try:
        for layer in _adapted_layers(model.module):
            weights = dict(layer.base_layer.named_parameters())
            kept.append((layer, {n: w.detach().to("cpu", copy=True) for n, w in weights.items()}))
            layer.merge(adapter_names=peft.active_adapters(layer))
        yield
    finally:
        for layer, weights in kept:
            with torch.no_grad():
                for name, param in layer.base_layer.named_parameters():
                    param.copy_(weights[name])
            layer.merged_adapters.clear()


def merged_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Return what the parameters of a base layer are with the active adapters merged.

    Args:
        layer: A layer with adapters, cut or whole; it stays as it is.

    Returns:
        New tensors by their name in the base layer, this rank's part of each.
    """
    base = layer.get_submodule("base_layer")
    found = {name: param.detach().clone() for name, param in base.named_parameters()}
    with torch.no_grad():
        # Inside of `merged_adapters` they are in the weights already.
        merged = set(peft.merged_adapters(layer))
        for adapter in (name for name in peft.active_adapters(layer) if name not in merged):
            changes = {
                "weight": peft.delta_weight(layer, adapter),
                "bias": peft.delta_bias(layer, adapter),
            }
            for name, change in changes.items():
                if change is not None:
                    found[name] += change.to(found[name].dtype)
    return found


class PlainView:
    """A causal LM as it would be without adapters, the active ones merged; for an export.

    Args:
        lm: The model inside a ``PeftModel``, or any model.
    """

    def __init__(self, lm: nn.Module) -> None:
        self._layers = {name: layer for name, layer in lm.named_modules() if peft.is_lora(layer)}
        copies = [copy for copy in lm.modules() if peft.is_saved_copy(copy)]
        active = (peft.active_adapters(layer) for layer in (*self._layers.values(), *copies))
        self._active = list(dict.fromkeys(itertools.chain(*active)))

    def name(self, name: str) -> str | None:
        """Return the plain name of a tensor; ``None`` if the plain model has no such tensor."""
        # Several adapters may be active, of which one has a copy of its own.
        found = (plain_name(name, adapter) for adapter in self._active or [""])
        return next((plain for plain in found if plain is not None), None)

    def merged(self, name: str) -> Tensor | None:
        """Return this rank's part of a tensor that adapters change; ``None`` for any other."""
        module, _, key = name.rpartition(".")
        layer = self._layers.get(module)
        return None if layer is None else merged_tensors(layer)[key]


def plain_name(name: str, adapter: str = "default") -> str | None:
    """Return the name that a parameter of a ``PeftModel`` has in the model without adapters.

    Args:
        name: Its name in the ``PeftModel``, or in the causal LM inside it.
        adapter: The adapter whose copies of saved modules count.

    Returns:
        ``None`` for what the plain model has not: factors, and originals that a copy replaces.
    """
    plain = name.removeprefix("base_model.model.")
    if "lora_" in plain or _ORIGINAL in plain:
        return None
    if _COPIES in plain:
        ours = f"{_COPIES}{adapter}."
        return plain.replace(ours, "") if ours in plain else None
    return plain.replace(_BASE, "")


def _peft_model(model: ShardedModel) -> tuple[str, nn.Module]:
    found = list(peft.peft_models(model.module))
    if len(found) != 1:
        raise ConfigError(
            f"{type(model.module).__name__} holds {len(found)} PeftModels, and an adapter is "
            "exported from exactly one; wrap the model by peft.get_peft_model(model, config)."
        )
    name, peft_model = found[0]
    return f"{name}." if name else "", peft_model


def _adapted_layers(module: nn.Module) -> list[Any]:
    """Return the layers with adapters that this rank's stage holds."""
    layers = [layer for layer in module.modules() if peft.is_lora(layer)]
    return [layer for layer in layers if any(p.numel() for p in layer.parameters())]


def check_mergeable(model: ShardedModel) -> None:
    """Check that merging gives what the forward computes, and changes no other module. Collective.

    Raises:
        ConfigError: If an adapter is no plain LoRA, or a weight below one is tied to another
            module's; on all ranks.
    """
    agreed(model.mesh, lambda: _check_layers(model.module))
    # Names are those of the whole model, so all ranks see the same.
    for first, others in model.surgery.aliases.items():
        names = [first, *others]
        adapted = [name for name in names if f".{_BASE}" in name]
        replaced = [name for name in names if f".{_ORIGINAL}" in name]
        if adapted or 0 < len(replaced) < len(names):
            name = (adapted or replaced)[0].split(f".{_BASE}")[0].split(f".{_ORIGINAL}")[0]
            raise ConfigError(
                f"the adapters of {name} cannot be merged: its weight is tied to another module's, "
                "which would change, too. Export the adapter instead, or train untied weights "
                "(tie_word_embeddings=False)."
            )


def _check_layers(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        if not peft.is_lora(layer) or not any(p.numel() for p in layer.parameters()):
            continue
        if obstacle := peft.merge_obstacle(layer):
            raise ConfigError(
                f"the adapters of {name} cannot be merged: {obstacle}. Use "
                "strategy.export_adapter(module, path), and merge with peft in one process."
            )


def _gathered(model: ShardedModel) -> dict[str, Tensor]:
    """Put the adapters' tensors together on rank 0; the others get nothing. Collective."""

    def is_adapters(name: str, tensor: Tensor) -> bool:
        return "lora_" in name or _COPIES in name or tensor.requires_grad

    tensors = [t for t in model_tensors("model", model, is_adapters) if t.writer]
    mine = [(str(t.path[1]), t.global_shape, _on_host(t)) for t in tensors]
    whole: dict[str, Tensor] = {}
    for parts in all_gather_objects(mine, model.mesh.control):
        if model.mesh.rank != 0:
            continue
        for name, shape, pieces in parts:
            for box, piece in pieces:
                target = whole.setdefault(name, piece.new_empty(shape))
                target[tuple(slice(at, at + n) for at, n in zip(*box, strict=True))] = piece
    return whole


def _on_host(tensor: LocalTensor) -> list[tuple[Any, Tensor]]:
    # Cloned, for pickling a view would send the whole bucket behind it.
    return [(box, piece.detach().to("cpu", copy=True)) for box, piece in tensor.pieces]


def _write(folder: Path, peft_model: nn.Module, whole: dict[str, Tensor], adapter: str) -> None:
    state = peft.adapter_state(peft_model, whole, adapter)
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f"{WEIGHTS_FILE}.incomplete"
    save_file({name: t.contiguous() for name, t in state.items()}, staging, {"format": "pt"})
    peft.save_adapter_config(peft_model, adapter, str(folder))
    staging.replace(folder / WEIGHTS_FILE)
