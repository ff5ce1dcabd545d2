"""The state dict that an optimizer would have in one process, put together from all ranks.

FSDP's ``full_optim_state_dict`` gathers whole flat parameters. Here one parameter's state travels
at a time, from the ranks that a checkpoint would have it written by, so that no rank holds more
than the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from goose_strategy.checkpoint.manifest import nested
from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.runtime.state import optimizer_contents

if TYPE_CHECKING:
    from goose_strategy.checkpoint.manifest import LocalTensor
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.runtime.model import ShardedModel

_ENTRY = "optimizer"
_Part = tuple[tuple[int, ...], tuple[int, ...], Tensor]


def full_optimizer_state(
    model: ShardedModel, optimizer: Optimizer, *, rank0_only: bool
) -> dict[str, Any]:
    """Return the whole state of an optimizer. Collective over the world.

    Args:
        model: The sharded model.
        optimizer: One of its optimizers.
        rank0_only: Whether the other ranks return an empty dict.
    """
    tensors, objects = optimizer_contents(_ENTRY, model, optimizer)
    mine = {tensor.path: tensor for tensor in tensors if tensor.writer}
    known: dict[tuple[Any, ...], tuple[tuple[int, ...], torch.dtype]] = {}
    described = {path: (tensor.global_shape, tensor.dtype) for path, tensor in mine.items()}
    for found in all_gather_objects(described, model.mesh.control):
        known.update(found)
    keeps = model.mesh.rank == 0 or not rank0_only
    state: dict[str, dict[str, Tensor]] = {}
    for path in sorted(known, key=str):
        whole = _gathered(mine.get(path), *known[path], mesh=model.mesh, keeps=keeps)
        if whole is not None:
            state.setdefault(path[2], {})[path[3]] = whole
    return _numbered(nested(objects)[_ENTRY]["param_groups"], state) if keeps else {}


def _gathered(
    tensor: LocalTensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    mesh: ParallelMesh,
    keeps: bool,
) -> Tensor | None:
    parts: list[_Part] = []
    for box, piece in tensor.pieces if tensor is not None else ():
        parts.append((tuple(box.offsets), tuple(box.lengths), piece.detach().cpu().clone()))
    every = all_gather_objects(parts, mesh.control)
    if not keeps:
        return None
    whole = torch.empty(shape, dtype=dtype)
    for offsets, lengths, piece in (part for parts in every for part in parts):
        place = tuple(slice(at, at + n) for at, n in zip(offsets, lengths, strict=True))
        whole[place] = piece
    return whole


def _numbered(groups: list[dict[str, Any]], state: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Replace parameter names by positions, as torch's optimizers have them."""
    numbers: dict[str, int] = {}
    for group in groups:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
    return {
        "state": {numbers[name]: entries for name, entries in state.items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]} for group in groups
        ],
    }
