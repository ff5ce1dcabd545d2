"""Weights and optimizer states of a model that is cut over tp, pp and dp, as ``LocalTensor`` s.

Torch's ``get_optimizer_state_dict`` knows parameters that are ``DTensor`` s. A ZeRO-1 rank has for
each parameter a range of its flattened tp-local part; here that becomes boxes of the whole tensor
under the parameter's own name, as one process would have saved it.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from goose_strategy.checkpoint.manifest import EntryPath, LocalTensor, flattened
from goose_strategy.errors import CheckpointError
from goose_strategy.mesh.shard import ShardSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from goose_strategy.checkpoint.opened import Checkpoint, StoredTensor
    from goose_strategy.mesh.mesh import ParallelMesh

FlatRange = tuple[Tensor, int, int]
"""A range ``[start, stop)`` of a flattened tp-local parameter, and the elements it holds."""

OptimizerState = dict[str, dict[str, "FlatRange | Tensor | float | int"]]
"""Per parameter name and state name: this rank's range, or a value for the whole parameter."""


def weight_tensors(
    entry: str,
    weights: Mapping[str, Tensor],
    specs: Mapping[str, ShardSpec],
    *,
    mesh: ParallelMesh,
    aliases: Mapping[str, Sequence[str]] | None = None,
) -> list[LocalTensor]:
    """Describe the parameters and persistent buffers of this rank's part of a model.

    Args:
        entry: The user's name for the model.
        weights: Local tensors per name in the model; the same names on all dp and tp ranks.
        specs: What part of the whole each is. A tensor without one is a buffer: replicated, and
            possibly held by other stages too.
        mesh: This rank's place. The dp ranks divide the writing between them by size.
        aliases: Further names per name (of tied weights), under which a plain model looks for them.

    Returns:
        One `LocalTensor` per weight, in the order of ``weights``.
    """
    sizes = {name: weight.numel() * weight.element_size() for name, weight in weights.items()}
    writers = divide_writing(sizes, mesh.dp_size)
    found: list[LocalTensor] = []
    for name, weight in weights.items():
        spec = specs.get(name) or ShardSpec.replicated(name, weight)
        mine = writers[name] == mesh.dp_rank and spec.tie_owner
        found.append(
            LocalTensor(
                (entry, saved_name(spec, name)),
                tuple(spec.global_shape),
                weight.dtype,
                tuple(spec.pieces(weight.detach())),
                writer=mine and (spec.is_sharded or mesh.tp_rank == 0),
                aliases=tuple((entry, other) for other in (aliases or {}).get(name, ())),
                shared=name not in specs,
            )
        )
    return found


def optimizer_tensors(
    entry: str,
    state: Mapping[str, Mapping[str, Any]],
    specs: Mapping[str, ShardSpec],
    *,
    mesh: ParallelMesh,
) -> list[LocalTensor]:
    """Describe this rank's part of an optimizer's state.

    Args:
        entry: The user's name for the optimizer.
        state: As `OptimizerState`.
        specs: Spec of every parameter in ``state``.
        mesh: This rank's place.

    Returns:
        One `LocalTensor` per parameter and state name, under ``(entry, "state", name, key)``.
    """
    found: list[LocalTensor] = []
    for name, values in state.items():
        spec = specs[name]
        starts = [
            value[1] for value in values.values() if isinstance(value, tuple) and value[0].numel()
        ]
        is_writer = spec.tie_owner and (spec.is_sharded or mesh.tp_rank == 0)
        # Of a value for the whole parameter the rank with the first element is the writer.
        is_first = is_writer and mesh.tp_rank == 0 and (0 in starts or not starts)
        for key, value in values.items():
            path = (entry, "state", saved_name(spec, name), key)
            if isinstance(value, tuple):
                found.append(_ranged(path, spec, value, writer=is_writer))
            else:
                found.append(LocalTensor.whole(path, torch.as_tensor(value), writer=is_first))
    return found


def optimizer_objects(
    entry: str, param_groups: Sequence[Mapping[str, Any]], *, has_state: bool = True
) -> dict[EntryPath, Any]:
    """Describe what an optimizer keeps beside its tensors, as DCP takes it apart.

    Args:
        entry: The user's name for the optimizer.
        param_groups: Groups of the whole model, with ``params`` as a list of parameter names in the
            order that one process would have.
        has_state: Whether any rank has tensors of this optimizer. Without them its ``state`` is
            kept as an empty dict, which torch wants to see.

    Returns:
        Values per path.
    """
    objects = flattened((entry, "param_groups"), [dict(group) for group in param_groups])
    return objects if has_state else {(entry, "state"): {}, **objects}


def merged_groups(
    per_stage: Iterable[Sequence[Mapping[str, Any]]], order: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Put the parameter groups of all stages together: the first's settings, everybody's names.

    torch's ``load_state_dict`` hands states out by position, whatever their shapes, so the names
    have to come in the order of one process; that of the stages is another one where a module
    behind the stack stands before it in the model (OPT's last norm).

    Args:
        per_stage: Groups per stage in order, with ``params`` as lists of names.
        order: Place of each name in one process. Names of one stage keep their own order.

    Returns:
        Groups of the whole model; a name that two stages have (a tied weight) is listed once.

    Raises:
        CheckpointError: If the stages have different numbers of groups.
    """
    stages = list(per_stage)
    counts = sorted({len(groups) for groups in stages})
    if len(counts) != 1:
        raise CheckpointError(f"the stages have different numbers of parameter groups: {counts}.")
    merged: list[dict[str, Any]] = []
    for groups in zip(*stages, strict=True):
        stages_names = [group["params"] for group in groups]
        names = dict.fromkeys(heapq.merge(*stages_names, key=lambda name: order[name]))
        merged.append({**groups[0], "params": list(names)})
    return merged


def empty_optimizer_state(
    entry: str,
    checkpoint: Checkpoint,
    ranges: Mapping[str, tuple[int, int]],
    specs: Mapping[str, ShardSpec],
    *,
    device: torch.device,
) -> OptimizerState:
    """Allocate the state that a checkpoint holds for this rank's ranges.

    Loading into it leaves the optimizer alone until everything has been read. Pass it to
    `optimizer_tensors` for the destinations, and to the optimizer once they are filled.

    Args:
        entry: The user's name for the optimizer.
        checkpoint: The opened checkpoint.
        ranges: This rank's range ``[start, stop)`` of each flattened tp-local parameter.
        specs: Spec of every parameter in ``ranges``.
        device: Where the state shall live.

    Returns:
        Uninitialised state; a parameter for which the checkpoint has none is left out.
    """
    stored: dict[str, dict[str, StoredTensor]] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.path[:2] == (entry, "state") and len(tensor.path) == 4:
            stored.setdefault(str(tensor.path[2]), {})[str(tensor.path[3])] = tensor
    # A parameter without dimensions cannot tell its moments from its step count; the others can.
    ranged = {key for found in stored.values() for key, tensor in found.items() if tensor.shape}
    state: OptimizerState = {}
    for name, (start, stop) in ranges.items():
        values: dict[str, FlatRange | Tensor | float | int] = {}
        for key, tensor in stored.get(saved_name(specs[name], name), {}).items():
            if key in ranged:
                flat = torch.empty(stop - start, dtype=tensor.dtype, device=device)
                values[key] = (flat, start, stop)
            else:
                # torch keeps step counts on the CPU, whatever the parameter's device.
                values[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if values:
            state[name] = values
    return state


def divide_writing(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Divide tensors that all of ``ranks`` hold between them, largest first.

    Args:
        sizes: Bytes per name; the same on all of the ranks.
        ranks: Number of ranks.

    Returns:
        Writing rank per name; the same on all of the ranks.
    """
    loads = [0] * ranks
    writers: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        writers[name] = loads.index(min(loads))
        loads[writers[name]] += sizes[name]
    return writers


def saved_name(spec: ShardSpec, name: str) -> str:
    """Return the name in the checkpoint: a copy of a tied weight is not saved under its own."""
    return spec.tie if spec.tie is not None and not spec.tie_owner else name


def _ranged(path: EntryPath, spec: ShardSpec, value: FlatRange, *, writer: bool) -> LocalTensor:
    flat, start, stop = value
    pieces = spec.flat_range_pieces(flat, start, stop)
    return LocalTensor(path, tuple(spec.global_shape), flat.dtype, tuple(pieces), writer)
