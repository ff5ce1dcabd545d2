"""The Trainer's checkpoints: weights and optimizer states as shards, the rest in ``meta.pt``.

The Trainer builds one dict with a state dict of the module and of each optimizer. On a shard those
would be partial, so they are replaced here by the boxes that this rank holds, under the names that
Lightning's own sharded strategies use (``model``, ``optimizer_0``, ...).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from goose_strategy.checkpoint.load import open_checkpoint
from goose_strategy.checkpoint.rng import RNG_KEY, gather_rng_states, scatter_rng_states
from goose_strategy.checkpoint.save import Contents, save_checkpoint
from goose_strategy.errors import CheckpointError
from goose_strategy.runtime.state import (
    identity_of,
    load_model_and_optimizers,
    model_tensors,
    optimizer_contents,
    origins_of,
)
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

WEIGHTS = "model"
"""Entry of the weights, under which Lightning's consolidation of a Trainer checkpoint looks."""

STATE_DICT = "state_dict"


def save_trainer_state(
    runtime: ParallelRuntime,
    module: nn.Module,
    checkpoint: dict[str, Any],
    path: Any,
    *,
    storage_options: Any = None,
) -> None:
    """Save the Trainer's checkpoint dict. Collective over the world.

    Raises:
        TypeError: If ``storage_options`` are given; there is no ``CheckpointIO`` behind this.
        CheckpointError: If saving failed on a rank; what was at ``path`` is still there then.
    """
    if storage_options is not None:
        raise TypeError("storage_options are not supported: no CheckpointIO is used.")
    model = _sharded(runtime, module)
    meta = dict(checkpoint)
    meta.pop(STATE_DICT, None)
    with_optimizers = meta.pop("optimizer_states", None) is not None
    tensors: list[LocalTensor] = model_tensors(WEIGHTS, model)
    objects: dict[EntryPath, Any] = {}
    for index, optimizer in enumerate(model.optimizers if with_optimizers else ()):
        more, groups = optimizer_contents(f"optimizer_{index}", model, optimizer)
        tensors += more
        objects |= groups
    meta[RNG_KEY] = gather_rng_states(runtime.mesh, runtime.dropout_streams)
    meta |= saved_privacy(runtime)
    contents = Contents(
        tensors=tensors,
        meta=meta,
        objects=objects,
        identity=identity_of(model),
        models={WEIGHTS: origins_of(model)},
    )
    save_checkpoint(os.fspath(path), contents, mesh=runtime.mesh)


def load_trainer_state(
    runtime: ParallelRuntime,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    path: Any,
    *,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Fill the module and its optimizers; return the rest of the Trainer's dict.

    Collective over the world. The path may also be a single file, of ``ddp`` or one process.

    Raises:
        CheckpointError: If there is no such checkpoint, it is damaged, or of another model;
            nothing is changed then.
    """
    model = _sharded(runtime, module)
    strict = bool(getattr(module, "strict_loading", True))
    # The Trainer hands on None where its user wrote False, so None cannot mean a refusal here.
    checkpoint = open_checkpoint(path, mesh=runtime.mesh, weights_only=bool(weights_only))
    entries = {f"optimizer_{index}": (model, o) for index, o in enumerate(optimizers)}
    stored = {tensor.path[0] for tensor in checkpoint.tensors.values()}
    known = {name: held for name, held in entries.items() if name in stored}
    meta = dict(checkpoint.meta)
    check_resume(runtime, meta, resumes=bool(optimizers))
    load_model_and_optimizers(checkpoint, {WEIGHTS: model}, known, mesh=runtime.mesh, strict=strict)
    states = meta.pop(RNG_KEY, None)
    load_privacy(runtime, meta.pop(PRIVACY_KEY, None))
    if states is not None and optimizers:
        scatter_rng_states(states, runtime.mesh, runtime.dropout_streams)
    return {**meta, STATE_DICT: {}}


def _sharded(runtime: ParallelRuntime, module: nn.Module) -> ShardedModel:
    model = runtime.model_of(module)
    if model is None:
        raise CheckpointError("The LightningModule is not set up yet.")
    return model
