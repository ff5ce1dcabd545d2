"""Values for a module that was cut on the meta device, and a refusal where there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from goose_strategy.errors import ConfigError
from goose_strategy.hub.read import check_placed, materialize
from goose_strategy.pipeline_parallel.ghost import place_ghosts

if TYPE_CHECKING:
    from goose_strategy.mesh.shard import ShardSpec


def fill(module: nn.Module, specs: Mapping[str, ShardSpec], device: torch.device) -> list[str]:
    """Give everything that is on the meta device memory, and its values where they are known.

    Args:
        module: The module, after its surgery.
        specs: Layout of every parameter.
        device: Where it shall live.

    Returns:
        Names of what holds NaN until a checkpoint is loaded.

    Raises:
        CheckpointError: If a file cannot be read.
        PlanError: If a buffer cannot be computed.
    """
    unfilled = materialize(module, specs, device)
    place_ghosts(module, device)
    check_placed(module)
    return unfilled


def refuse_unfilled(names: Sequence[str]) -> None:
    """Refuse to go on with tensors that hold NaN.

    Raises:
        ConfigError: If there are any.
    """
    if names:
        raise ConfigError(
            f"{names[0]} and {len(names) - 1} more have no values: the module was on the meta "
            "device when it was set up. Load a checkpoint first (fabric.load(path, {'model': "
            "model}), or ckpt_path of the Trainer), or build it by goose_strategy.from_pretrained."
        )
