"""``fabric.save`` and ``fabric.load`` for sharded modules.

A DCP folder with ``meta.pt``, as Lightning's own sharded strategies write it, so that
``fabric consolidate`` makes a single file of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from goose_strategy.checkpoint.load import open_checkpoint
from goose_strategy.checkpoint.rng import RNG_KEY, gather_rng_states, scatter_rng_states
from goose_strategy.checkpoint.save import Contents, save_checkpoint
from goose_strategy.errors import CheckpointError
from goose_strategy.runtime.state import (
    Filter,
    identity_of,
    load_model_and_optimizers,
    load_whole_state_dict,
    model_tensors,
    optimizer_contents,
    origins_of,
)
from goose_strategy.strategies import compat
from goose_strategy.strategies.private import (
    PRIVACY_KEY,
    check_resume,
    load_privacy,
    saved_privacy,
)

if TYPE_CHECKING:
    from goose_strategy.checkpoint.manifest import EntryPath, LocalTensor
    from goose_strategy.runtime.core import ParallelRuntime
    from goose_strategy.runtime.model import ShardedModel


def save_fabric_state(
    runtime: ParallelRuntime,
    path: Any,
    state: Mapping[str, Any],
    *,
    storage_options: Any = None,
    filters: Mapping[str, Filter] | None = None,
) -> None:
    """Save what ``fabric.save(path, state, filter=...)`` was given. Collective over the world.

    Raises:
        TypeError: If ``storage_options`` are given; there is no ``CheckpointIO`` behind this.
        CheckpointError: If saving failed on a rank; what was at ``path`` is still there then.
    """
    if storage_options is not None:
        raise TypeError("storage_options are not supported: no CheckpointIO is used.")
    keep = dict(filters or {})
    tensors: list[LocalTensor] = []
    objects: dict[EntryPath, Any] = {}
    meta: dict[str, Any] = {}
    identity: dict[str, str] = {}
    origins: dict[str, list[dict[str, Any]]] = {}
    for name, value in state.items():
        model = runtime.model_of(value) if isinstance(value, nn.Module) else None
        if model is not None:
            tensors += model_tensors(name, model, keep.get(name))
            identity |= identity_of(model)
            origins[name] = origins_of(model)
        elif isinstance(value, Optimizer) and (owner := runtime.owner_of(value)) is not None:
            more, groups = optimizer_contents(name, owner, compat.unwrap_optimizer(value))
            tensors += more
            objects |= groups
        else:
            meta[name] = _plain(value, keep.get(name))
    meta[RNG_KEY] = gather_rng_states(runtime.mesh, runtime.dropout_streams)
    meta |= saved_privacy(runtime)
    contents = Contents(
        tensors=tensors, meta=meta, objects=objects, identity=identity, models=origins
    )
    save_checkpoint(os.fspath(path), contents, mesh=runtime.mesh)


def load_fabric_state(
    runtime: ParallelRuntime,
    path: Any,
    state: Any,
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Load what ``fabric.load(path, state)`` was given. Collective over the world.

    Returns:
        The entries of the checkpoint that were not asked for.

    Raises:
        CheckpointError: If there is no such checkpoint, it is damaged, or of another model;
            nothing is changed then.
    """
    if isinstance(state, nn.Module):
        load_whole_state_dict(_sharded(runtime, state), _read_file(path), strict=strict)
        return {}
    if not isinstance(state, dict) or not state:
        raise CheckpointError(
            "fabric.load needs the objects to fill: fabric.load(path, {'model': model, ...}); "
            "`fabric consolidate PATH` makes one plain file of a sharded checkpoint."
        )
    checkpoint = open_checkpoint(path, mesh=runtime.mesh, weights_only=weights_only)
    models: dict[str, ShardedModel] = {}
    optimizers: dict[str, tuple[ShardedModel, Optimizer]] = {}
    others: list[str] = []
    for name, value in state.items():
        model = runtime.model_of(value) if isinstance(value, nn.Module) else None
        owner = runtime.owner_of(value) if isinstance(value, Optimizer) else None
        if model is not None:
            models[name] = model
        elif owner is not None:
            optimizers[name] = (owner, compat.unwrap_optimizer(value))
        else:
            others.append(name)
    meta = dict(checkpoint.meta)
    states = meta.pop(RNG_KEY, None)
    check_resume(runtime, meta, resumes=bool(optimizers))
    spent = meta.pop(PRIVACY_KEY, None)
    compat.validate_keys_for_strict_loading(others, meta.keys(), strict=strict)
    load_model_and_optimizers(checkpoint, models, optimizers, mesh=runtime.mesh, strict=strict)
    load_privacy(runtime, spent)
    for name in others:
        if name in meta:
            _put(state, name, meta.pop(name))
    if states is not None:
        scatter_rng_states(states, runtime.mesh, runtime.dropout_streams)
    return meta


def _read_file(path: Any) -> dict[str, Any]:
    try:
        whole: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as err:
        raise CheckpointError(f"path={os.fspath(path)!r} does not exist.") from err
    return whole


def _sharded(runtime: ParallelRuntime, module: nn.Module) -> ShardedModel:
    model = runtime.model_of(module)
    if model is None:
        raise CheckpointError(
            f"{type(module).__name__} is not set up yet; call fabric.setup(model) before loading."
        )
    return model


def _plain(value: Any, keep: Filter | None) -> Any:
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        value = value.state_dict()
    if keep is not None and isinstance(value, dict):
        return {k: v for k, v in value.items() if keep(k, v)}
    return value


def _put(state: dict[str, Any], name: str, value: Any) -> None:
    held = state[name]
    if hasattr(held, "state_dict") and hasattr(held, "load_state_dict"):
        held.load_state_dict(value)
    else:
        state[name] = value
