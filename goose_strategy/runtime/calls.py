"""Puts the forwards that run a whole step in the place of the models' own.

Which of them depends on what was done to a module: cut in depth, trained privately, or neither.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from goose_strategy.compat.transformers import computes_own_loss
from goose_strategy.runtime.forward import (
    DirectForward,
    OwnLossForward,
    PipelinedForward,
    PrivateForward,
)
from goose_strategy.runtime.naming import refuse_copy
from goose_strategy.runtime.pipeline import PipelineCall
from goose_strategy.runtime.private import PrivateTraining

if TYPE_CHECKING:
    from contextlib import ExitStack

    from goose_strategy.comm.watchdog import Watchdog
    from goose_strategy.runtime.model import ShardedModel


class Connected(NamedTuple):
    """What stands behind the calls of a module.

    Attributes:
        pipeline: Runs a schedule, also that of one stage; ``None`` where autograd alone does.
        private: What private training adds, or ``None``.
    """

    pipeline: PipelineCall | None
    private: PrivateTraining | None


def connect_calls(model: ShardedModel, watchdog: Watchdog | None, undo: ExitStack) -> Connected:
    """Patch the forward of every causal LM of a module.

    Args:
        model: The module, after its surgery.
        watchdog: Guards every action of a schedule, or ``None``.
        undo: Is told how to take everything back.

    Returns:
        What the calls will run.
    """
    surgery = model.surgery
    part = surgery.part or surgery.whole
    private: PrivateTraining | None = None
    pipeline: PipelineCall | None = None
    if model.ledger is not None and part is not None:
        private = PrivateTraining(model, part, model.ledger)
        undo.callback(private.close)
    for _, lm in surgery.models:
        if part is not None:
            config = model.config.pipeline if surgery.plan is None else surgery.plan.config
            pipeline = PipelineCall(model, part, config, watchdog, private)
        kind: type[DirectForward | PipelinedForward] = DirectForward
        if computes_own_loss(lm):
            kind = OwnLossForward
        elif part is not None:
            kind = PrivateForward if surgery.part is None else PipelinedForward
        _patch(lm, kind(model, lm.forward), undo)
        if model.mesh.tp is not None or surgery.part is not None:
            vars(lm)["__deepcopy__"] = partial(refuse_copy, type(lm).__name__)
            undo.callback(vars(lm).pop, "__deepcopy__", None)
    return Connected(pipeline, private)


def _patch(lm: nn.Module, forward: Any, undo: ExitStack) -> None:
    # On the instance, so that the class, isinstance checks and config survive.
    lm.forward = forward
    undo.callback(vars(lm).pop, "forward", None)
