"""Which plan a model is cut by: a proved one, transformers' own, or one that is found.

Each is only taken if it is exact: proved ones were compared with one process before, all others are
compared with an uncut clone at the set-up. A plan of transformers' that is wrong or of a kind that
is not cut here is no refusal where another can be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from goose_strategy.compat.transformers import is_pretrained, model_type
from goose_strategy.errors import PlanError
from goose_strategy.models.deduce import deduce_plan
from goose_strategy.models.registry import FAMILIES, plan_for
from goose_strategy.models.trial import Trial
from goose_strategy.models.verify import verify_plan
from goose_strategy.tensor_parallel.parallelize import check_cut

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.tensor_parallel.config import TensorConfig
    from goose_strategy.tensor_parallel.plan import TensorPlan


def choose_plan(model: nn.Module, mesh: ParallelMesh, config: TensorConfig) -> TensorPlan:
    """Return how a whole model is cut, before anything takes modules from it. Collective.

    Args:
        model: The model, equal on all ranks.
        mesh: The mesh.
        config: The user's settings.

    Returns:
        A plan that fits tp, and is exact unless ``config.verify_plan`` is off.

    Raises:
        PlanError: On all ranks, if there is none.
    """
    try:
        plan = plan_for(model, config)
    except PlanError:
        if not _may_deduce(model, config):
            raise
        return deduce_plan(model, config, Trial(model, mesh)).plan
    check_cut(model, plan, mesh.tp_size)
    if plan.proved or not config.verify_plan:
        return plan
    trial = Trial(model, mesh)
    try:
        return verify_plan(model, plan, mesh, trial=trial)
    except PlanError:
        if not _may_deduce(model, config):
            raise
        return deduce_plan(model, config, trial).plan


def _may_deduce(model: nn.Module, config: TensorConfig) -> bool:
    """Tell whether a plan may be looked for: whoever gives rules has chosen one."""
    wanted = config.deduce_plan and config.verify_plan and not config.rules
    return wanted and is_pretrained(model) and model_type(model) not in FAMILIES
