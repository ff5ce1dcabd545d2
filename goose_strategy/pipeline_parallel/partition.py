"""Which layers each stage gets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from goose_strategy.errors import ConfigError, PlanError
from goose_strategy.pipeline_parallel.balance import Work
from goose_strategy.pipeline_parallel.minmax import Bounds, Load, best_cut

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks

PARTITIONS = ("balanced", "uniform", "time", "memory")
"""The partitions that have a name."""


def partition_layers(partition: str | Sequence[int], work: Work | Load, chunks: Chunks) -> Bounds:
    """Cut a stack of layers into contiguous stages.

    ``"balanced"``, ``"time"`` and ``"memory"`` give the busiest rank as little as whole layers
    allow; they differ in what `work` says that a layer costs. ``"uniform"`` gives every stage the
    same number of layers. Where that is not possible, the stages before the last get one more each,
    from the back: the last one already has the head to compute, and the further forward a stage is,
    the more microbatches' activations it holds.

    Args:
        partition: One of `PARTITIONS`, or the number of layers of each stage.
        work: What each layer costs.
        chunks: Which rank holds which stages.

    Returns:
        ``stages + 1`` bounds: stage ``s`` owns the layers ``bounds[s]`` to ``bounds[s + 1] - 1``.

    Raises:
        ConfigError: If a list names another number of stages.
        PlanError: If there are more stages than layers, or a list does not sum to the layers.
    """
    layers, stages = len(work.layers), chunks.stages
    check_stages(layers, chunks)
    if partition == "uniform":
        counts = _uniform(layers, stages)
    elif isinstance(partition, str):
        load = work.load(stages) if isinstance(work, Work) else work
        return best_cut(load, chunks)
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
    return tuple(accumulate(counts, initial=0))


def check_stages(layers: int, chunks: Chunks) -> None:
    """Check that every stage can have a layer.

    Raises:
        PlanError: If not, with the numbers that work.
    """
    if layers >= chunks.stages:
        return
    advice = f"choose pp <= {layers // chunks.per_rank}"
    if chunks.per_rank > 1 and layers >= chunks.ranks:
        fewer = layers // chunks.ranks
        advice = f"choose at most {fewer} per rank (another schedule, if it needs more), or pp <= "
        advice += str(max(layers // chunks.per_rank, 1))
    raise PlanError(
        f"{chunks.describe()} is more than the model's {layers} layers; every "
        f"stage needs one, {advice}.",
        axis="pp",
    )


def _uniform(layers: int, stages: int) -> list[int]:
    each, extra = divmod(layers, stages)
    # The last stage is never among the extra ones, as there are fewer of them than stages.
    return [each + (stages - 1 - extra <= stage < stages - 1) for stage in range(stages)]
