"""Loading a checkpoint into another precision without losing what it knows of the weights.

In ``bf16-true`` the model's entry holds rounded weights, and the exact ones are the optimizer's
``main`` weights. Whoever loads such a checkpoint in ``32-true`` by key gets the rounded ones, and
whoever loads a ``32-true`` checkpoint in ``bf16-true`` starts from main weights that were rounded
on the way. Here each side reads the exact values, wherever the other one kept them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from goose_strategy.checkpoint.manifest import LocalTensor, key_of
from goose_strategy.checkpoint.state import OptimizerState, saved_name
from goose_strategy.optim.state import MAIN

if TYPE_CHECKING:
    from goose_strategy.checkpoint.opened import Checkpoint
    from goose_strategy.mesh.shard import ShardSpec


def weights_from_main(
    weights: Sequence[LocalTensor], checkpoint: Checkpoint, optimizers: Sequence[str]
) -> list[LocalTensor]:
    """Let weights be read from main weights, where those stored are of lower precision than here.

    Args:
        weights: Where a model's weights shall go.
        checkpoint: The opened checkpoint.
        optimizers: Entries of the model's optimizers that are loaded, too.

    Returns:
        The same destinations; some name another tensor of the checkpoint as their source, and
        their own as an alias, so that it does not count as unexpected.
    """
    found = []
    for weight in weights:
        stored = checkpoint.tensors.get(weight.key)
        mains = [(entry, "state", weight.path[1], MAIN) for entry in optimizers]
        main = next((path for path in mains if key_of(path) in checkpoint.tensors), None)
        is_rounded = stored is not None and stored.dtype.itemsize < weight.dtype.itemsize
        if main is None or not is_rounded:
            found.append(weight)
        else:
            found.append(replace(weight, path=main, aliases=(*weight.aliases, weight.path)))
    return found


def main_from_weights(
    state: OptimizerState,
    checkpoint: Checkpoint,
    entry: str,
    ranges: Mapping[str, tuple[int, int]],
    specs: Mapping[str, ShardSpec],
) -> list[LocalTensor]:
    """Let main weights be read from weights, where those stored are of higher precision than here.

    Args:
        state: The optimizer's state to be filled; gets a main weight for every such parameter.
        checkpoint: The opened checkpoint.
        entry: The model's entry.
        ranges: This rank's range of each flattened tp-local parameter.
        specs: Spec of every parameter in ``ranges``.

    Returns:
        Where the weights shall go; empty if they are stored in the precision of this run.
    """
    found = []
    for name, (start, stop) in ranges.items():
        spec = specs[name]
        path = (entry, saved_name(spec, name))
        stored = checkpoint.tensors.get(key_of(path))
        values = state.get(name, {})
        if stored is None or MAIN in values or stored.dtype.itemsize <= spec.dtype.itemsize:
            continue
        flat = torch.empty(stop - start, dtype=torch.float32)
        state[name] = {**values, MAIN: (flat, start, stop)}
        pieces = tuple(spec.flat_range_pieces(flat, start, stop))
        found.append(LocalTensor(path, tuple(spec.global_shape), flat.dtype, pieces, writer=False))
    return found
