"""Which layers each stage gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from goose_strategy.errors import ConfigError, PlanError
from goose_strategy.pipeline_parallel.balance import Work, balance

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks


def partition_layers(partition: str | Sequence[int], work: Work, chunks: Chunks) -> tuple[int, ...]:
    """Cut a stack of layers into contiguous stages.

    ``"balanced"`` makes the slowest stage as fast as whole layers allow, the head counted.
    ``"uniform"`` gives every stage the same number of layers. Where that is not possible, the
    stages before the last get one more each, from the back: the last one already has the head to
    compute, and the further forward a stage is, the more microbatches' activations it holds.

    Args:
        partition: ``"balanced"``, ``"uniform"`` or the number of layers of each stage.
        work: What each layer costs.
        chunks: Which rank holds which stages.

    Returns:
        ``stages + 1`` bounds: stage ``s`` owns the layers ``bounds[s]`` to ``bounds[s + 1] - 1``.

    Raises:
        ConfigError: If a list names another number of stages.
        PlanError: If there are more stages than layers, or a list does not sum to the layers.
    """
    layers, stages = len(work.layers), chunks.stages
    if layers < stages:
        raise PlanError(
            f"{chunks.describe()} is more than the model's {layers} layers; every stage needs one, "
            f"choose pp <= {layers // chunks.per_rank}.",
            axis="pp",
        )
    if isinstance(partition, str):
        counts = balance(work, stages) if partition == "balanced" else _uniform(layers, stages)
    else:
        counts = list(partition)
    if len(counts) != stages:
        raise ConfigError(
            f"partition={counts} lists {len(counts)} stages but {chunks.describe()}; list one "
            "number of layers per stage.",
            axis="pp",
        )
    if sum(counts) != layers or min(counts) < 1:
        raise PlanError(
            f"partition={counts} sums to {sum(counts)}, but the model has {layers} layers; list "
            "numbers >= 1 that sum to them.",
            axis="pp",
        )
    return tuple(sum(counts[:stage]) for stage in range(stages + 1))


def _uniform(layers: int, stages: int) -> list[int]:
    each, extra = divmod(layers, stages)
    # The last stage is never among the extra ones, as there are fewer of them than stages.
    return [each + (stages - 1 - extra <= stage < stages - 1) for stage in range(stages)]
