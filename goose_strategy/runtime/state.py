"""What a checkpoint of sharded modules holds, and how it comes back.

The doors know which objects the user named; here each becomes tensors of the whole model, seen from
one rank (:mod:`goose_strategy.checkpoint`). Weights and optimizer states are named as one process
would name them, so any layout reads what any layout wrote.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from goose_strategy.checkpoint.agree import collect
from goose_strategy.checkpoint.load import load_tensors
from goose_strategy.checkpoint.state import (
    OptimizerState,
    empty_optimizer_state,
    merged_groups,
    optimizer_objects,
    optimizer_tensors,
    weight_tensors,
)
from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.errors import CheckpointError
from goose_strategy.hub.plan import listed
from goose_strategy.optim.state import (
    Range,
    load_named_optimizer_state,
    named_optimizer_state,
    owned_ranges,
    settle_loaded,
)
from goose_strategy.runtime.origin import Origin
from goose_strategy.runtime.recast import main_from_weights, weights_from_main

if TYPE_CHECKING:
    from goose_strategy.checkpoint.manifest import EntryPath, LocalTensor
    from goose_strategy.checkpoint.opened import Checkpoint
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.optim.zero import ZeroShards
    from goose_strategy.runtime.model import ShardedModel

Filter = Callable[[str, Any], bool]


def model_tensors(entry: str, model: ShardedModel, keep: Filter | None = None) -> list[LocalTensor]:
    """Describe this rank's weights and persistent buffers.

    Args:
        entry: The user's name for the model.
        model: The sharded model.
        keep: Keep only the weights for which it returns true.

    Returns:
        The tensors; their pieces share storage with the weights.
    """
    model.synchronize()
    weights: dict[str, Tensor] = dict(model.module.named_parameters())
    saved = model.module.state_dict(keep_vars=True)
    weights |= {name: b for name, b in model.module.named_buffers() if name in saved}
    if keep is not None:
        weights = {name: tensor for name, tensor in weights.items() if keep(name, tensor)}
    aliases = {n: others for n, others in model.surgery.aliases.items() if n in weights}
    return weight_tensors(entry, weights, model.surgery.specs, mesh=model.mesh, aliases=aliases)


def identity_of(model: ShardedModel) -> dict[str, str]:
    """Return the facts that a model must share to load this model's checkpoint."""
    return {"class": ", ".join(type(lm).__name__ for _, lm in model.surgery.models)}


def origins_of(model: ShardedModel) -> list[dict[str, Any]]:
    """Return what an export of a saved model has to know of it, as plain values.

    Raises:
        ConfigError: If the model's weights were never loaded.
    """
    model.check_filled()
    try:
        return [asdict(Origin.of(prefix, lm)) for prefix, lm in model.surgery.models]
    except TypeError as err:
        # Training has gone on for hours; what cannot be exported later is saved all the same.
        warnings.warn(
            f"the checkpoint cannot be exported to the hub later: the model's config cannot be "
            f"written as JSON ({err}).",
            UserWarning,
            stacklevel=2,
        )
        return []


def optimizer_contents(
    entry: str, model: ShardedModel, optimizer: Optimizer
) -> tuple[list[LocalTensor], dict[EntryPath, Any]]:
    """Describe this rank's part of an optimizer. Collective over the world.

    Returns:
        Its tensors, and the values beside them (the parameter groups by parameter name).
    """
    zero = _shards(model, optimizer)
    tensors = optimizer_tensors(
        entry, named_optimizer_state(zero), model.surgery.specs, mesh=model.mesh
    )
    per_rank = all_gather_objects(_named_groups(model, optimizer), model.mesh.control)
    stages = [per_rank[model.mesh.layout.stage_rank(0, s)] for s in range(model.mesh.pp_size)]
    has_state = any(all_gather_objects(bool(tensors), model.mesh.control))
    return tensors, optimizer_objects(
        entry, merged_groups(stages, model.order_of(optimizer)), has_state=has_state
    )


def load_model_and_optimizers(
    checkpoint: Checkpoint,
    models: Mapping[str, ShardedModel],
    optimizers: Mapping[str, tuple[ShardedModel, Optimizer]],
    *,
    mesh: ParallelMesh,
    strict: bool,
) -> None:
    """Fill weights and optimizers from an opened checkpoint. Collective over the world.

    Nothing is changed before everything has been checked on all ranks.

    Args:
        checkpoint: The opened checkpoint.
        models: Sharded models by entry.
        optimizers: Optimizers and their models by entry.
        mesh: The ranks.
        strict: Refuse missing and unexpected keys.

    Raises:
        CheckpointError: If the checkpoint is of another model or damaged.
    """
    destinations: list[LocalTensor] = []
    states: dict[str, OptimizerState] = {}
    for entry, model in models.items():
        own = [name for name, (owner, _) in optimizers.items() if owner is model]
        destinations += weights_from_main(model_tensors(entry, model), checkpoint, own)
    entries = {model: entry for entry, model in models.items()}
    for entry, (model, optimizer) in optimizers.items():
        ranges = owned_ranges(_shards(model, optimizer))
        state = empty_optimizer_state(
            entry, checkpoint, ranges, model.surgery.specs, device=model.mesh.device
        )
        states[entry] = state
        destinations += optimizer_tensors(entry, state, model.surgery.specs, mesh=model.mesh)
        if model in entries:
            specs = model.surgery.specs
            destinations += main_from_weights(state, checkpoint, entries[model], ranges, specs)
    identity: dict[str, str] = {}
    for model in models.values():
        identity |= identity_of(model)
    groups: dict[str, Sequence[Mapping[str, Any]]] = {}
    for entry, (_, optimizer) in optimizers.items():
        doing = f"loading {entry!r} of path={checkpoint.name!r}"
        check = partial(_checked_groups, checkpoint, entry, optimizer)
        groups[entry] = collect(mesh, doing, check)[mesh.rank]
    mismatch = load_tensors(
        checkpoint,
        destinations,
        mesh=mesh,
        entries=[*models, *optimizers],
        identity=identity,
        strict=strict,
    )
    for entry, model in models.items():
        _note_filled(model, entry, mismatch.missing)
        _take_over_weights(model)
    for entry, (model, optimizer) in optimizers.items():
        zero = _shards(model, optimizer)
        load_named_optimizer_state(zero, _as_ranges(states[entry]))
        settle_loaded(zero)
        for group, saved in zip(optimizer.param_groups, groups[entry], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})


def load_whole_state_dict(
    model: ShardedModel, state_dict: Mapping[str, Tensor], *, strict: bool
) -> None:
    """Fill this rank's shards from the state dict of a whole, unsharded model.

    Args:
        model: The sharded model.
        state_dict: Whole tensors by name, as a plain module would save them.
        strict: Refuse names that are missing.

    Raises:
        CheckpointError: If a name is missing or a shape differs; nothing is changed then.
    """
    tensors = model_tensors("model", model)
    missing, wrong = [], []
    for tensor in tensors:
        name = str(tensor.path[1])
        whole = state_dict.get(name)
        if whole is None:
            missing.append(name)
        elif tuple(whole.shape) != tensor.global_shape:
            wrong.append(f"{name} has shape={tuple(whole.shape)}, not {tensor.global_shape}")
    if wrong or (strict and missing):
        listed = "; ".join([*wrong[:5], *(f"{name} is missing" for name in missing[:5])])
        raise CheckpointError(f"The state dict is of another model: {listed}.")
    with torch.no_grad():
        for tensor in tensors:
            name = str(tensor.path[1])
            for box, piece in tensor.pieces if name in state_dict else ():
                part = state_dict[name]
                for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                piece.copy_(part)
    _note_filled(model, "model", [f"model.{name}" for name in missing])
    _take_over_weights(model)


def _note_filled(model: ShardedModel, entry: str, missing: Sequence[str]) -> None:
    """Note that weights which were on the meta device have values now.

    Raises:
        CheckpointError: If the checkpoint, loaded with ``strict=False``, does not hold all of them.
    """
    lost = sorted({f"{entry}.{name}" for name in model.unfilled} & {*missing})
    if lost:
        raise CheckpointError(
            f"the model has no values for {listed(lost)}, and the checkpoint holds none; with "
            "weights from the meta device it must hold them all."
        )
    model.unfilled = []


def _take_over_weights(model: ShardedModel) -> None:
    """Rebuild fp32 main weights from the weights just loaded."""
    for zero in model.shards:
        for shard in zero.shards:
            if shard.separate:
                shard.rebuild_main()


def _shards(model: ShardedModel, optimizer: Optimizer) -> ZeroShards:
    found = model.shards_of(optimizer)
    if not found:
        raise CheckpointError(
            f"{type(optimizer).__name__} is not set up with the model; call "
            "fabric.setup(model, optimizer) before saving or loading."
        )
    return found[0]


def _named_groups(model: ShardedModel, optimizer: Optimizer) -> list[dict[str, Any]]:
    names = {id(p): name for name, p in model.module.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        local = [names[id(p)] for p in group["params"]]
        whole = [model.surgery.tied.get(name, name) for name in local]
        groups.append({**group, "params": whole})
    return groups


def _checked_groups(
    checkpoint: Checkpoint, entry: str, optimizer: Optimizer
) -> Sequence[Mapping[str, Any]]:
    saved: Sequence[Mapping[str, Any]] = checkpoint.read_objects(entry).get("param_groups", [])
    if len(saved) != len(optimizer.param_groups):
        raise CheckpointError(
            f"{entry!r} has {len(saved)} parameter groups in the checkpoint, but "
            f"{len(optimizer.param_groups)} here."
        )
    return saved


def _as_ranges(state: OptimizerState) -> dict[str, dict[str, Any]]:
    return {
        name: {k: Range(*v) if isinstance(v, tuple) else v for k, v in values.items()}
        for name, values in state.items()
    }
