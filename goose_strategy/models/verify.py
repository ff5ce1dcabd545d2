"""A plan that nobody has proved is tried out on a few layers of the model before it is used.

transformers' plans were written for inference, where a parameter whose gradient is a share of the
whole does no harm: its own Apertus trains wrongly for that. Here such a plan is held against an
uncut clone (see `goose_strategy.models.trial`); of parameters that no rule names, the comparison
tells whether their gradient is a share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from goose_strategy.errors import PlanError
from goose_strategy.models.trial import Trial

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.tensor_parallel.plan import TensorPlan


def verify_plan(
    model: nn.Module, plan: TensorPlan, mesh: ParallelMesh, *, trial: Trial | None = None
) -> TensorPlan:
    """Compare a cut clone of ``model`` with an uncut one. Collective over the world.

    Args:
        model: The whole model, before it is cut; only its class and config are looked at.
        plan: How it will be cut.
        mesh: The mesh.
        trial: The uncut clone, if it was built already.

    Returns:
        The plan, with what was guessed in it found out.

    Raises:
        PlanError: On all ranks, naming what differs most.
    """
    verdict = (trial or Trial(model, mesh)).judge(plan)
    if verdict.plan is None:
        raise PlanError(
            f"the tensor-parallel plan of the family {plan.family!r} does not {verdict.reason}. "
            "Give the missing rules in TensorConfig(rules={...}), 'partial' for parameters between "
            "a column and a row layer and 'replicated' for others, or use tp=1.",
            axis="tp",
        ) from verdict.cause
    return verdict.plan
