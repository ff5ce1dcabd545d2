"""Refuses the step of an optimizer that was never set up with its module.

Under ``ddp`` such a script works: every rank has the whole sum of the gradients before an optimizer
looks at them. Here a rank has the sum of its own slice only, and in private training no noise yet,
so that the step would run, and be wrong, on every replica in another way.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from goose_strategy.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import ExitStack

    from goose_strategy.runtime.model import ShardedModel


def refuse_strays(model: ShardedModel, undo: ExitStack) -> None:
    """Refuse, from now on, steps of optimizers that hold parameters of a module and are not its.

    With one replica and without privacy gradients are whole, and any optimizer's step is right.

    Args:
        model: The module; not kept alive.
        undo: Is told how to take this back.
    """
    if model.mesh.dp_size == 1 and model.ledger is None:
        return
    # Of all optimizers: one that was not set up is not known here.
    handle = register_optimizer_step_pre_hook(partial(_check, weakref.ref(model)))
    undo.callback(handle.remove)


def _check(
    reference: weakref.ref[ShardedModel],
    optimizer: Optimizer,
    _args: tuple[Any, ...],
    _kwargs: dict[str, Any],
) -> None:
    model = reference()
    if model is None or any(optimizer is known for known in model.optimizers):
        return
    trained = {id(param) for param in model.module.parameters() if param.requires_grad}
    if not any(
        id(param) in trained for group in optimizer.param_groups for param in group["params"]
    ):
        return
    why = (
        f"with dp={model.mesh.dp_size} a rank has the sum of its own slice of the gradients only"
        if model.ledger is None
        else "its step would be one without noise"
    )
    raise ConfigError(
        f"{type(optimizer).__name__} steps parameters of {type(model.module).__name__} but was not "
        f"set up: {why}. Use fabric.setup(model, optimizer), or fabric.setup_optimizers(optimizer) "
        "after fabric.setup_module(model); in a LightningModule return it from "
        "configure_optimizers."
    )
