"""Settings of the pipeline, checked before any process group exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import Tensor

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.schedule import SCHEDULES
from goose_strategy.validate import at_least, one_of, positive, whole

LossFunction: TypeAlias = Callable[[Any, dict[str, Any]], tuple[Tensor, Tensor]]
"""``loss_fn(outputs, microbatch) -> (sum of the losses, number of the summed items)``."""

DEFAULT_MICROBATCHES_PER_STAGE = 2


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a model is cut in depth and how its stages take turns. At ``pp=1`` only `recompute` acts.

    Attributes:
        schedule: ``"1F1B"`` (a stage holds activations of at most ``pp`` microbatches) or
            ``"GPipe"`` (of all of them).
        num_microbatches: Into how many parts a batch is cut along its rows; a batch of fewer rows
            is cut into its rows. ``None``: two per stage, or fewer for a smaller batch. The idle
            share of a step is ``(pp - 1) / (num_microbatches + pp - 1)``.
        partition: ``"balanced"`` (stages of equal work, the head counted), ``"uniform"`` (the same
            number of layers), or the number of layers of each stage.
        recompute: What is computed a second time instead of kept. ``"none"``. ``"full"`` (needs
            ``pp > 1``): a stage keeps only the inputs of a microbatch, and runs its forward again
            while the gradient is still on its way. ``"layer"``: within the backward, one decoder
            layer after another. Or names of modules in the model, layer numbers as ``*``, which
            take the place of the layers: ``["model.layers.*.mlp"]``.
        trim_padding: Drop the columns on the right that are padding in every row of a microbatch.
        return_logits: Collect the logits on the last stage in training calls too.
        loss_fn: Loss of the last stage's outputs where the model's own is not wanted. It returns
            the sum and the number of its terms, which are divided over all microbatches.
        first_step_timeout_s: Seconds the first step may take until the watchdog ends the run.
        step_timeout_s: The same for every later step.
    """

    schedule: Literal["1F1B", "GPipe"] = "1F1B"
    num_microbatches: int | None = None
    # Not str: a command line's "[1, 3]" would be taken for a name.
    partition: Literal["balanced", "uniform"] | list[int] = "balanced"
    recompute: Literal["none", "full", "layer"] | list[str] = "none"
    trim_padding: bool = False
    return_logits: bool = False
    loss_fn: LossFunction | None = None
    first_step_timeout_s: float = 300.0
    step_timeout_s: float = 100.0

    def __post_init__(self) -> None:
        """Check every setting that needs no model.

        Raises:
            ConfigError: Naming the setting, its value and what is allowed.
        """
        one_of(SCHEDULES, schedule=self.schedule)
        if self.num_microbatches is not None:
            whole(num_microbatches=self.num_microbatches)
            at_least(1, num_microbatches=self.num_microbatches)
        self._check_partition()
        self._check_recompute()
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ConfigError(
                f"loss_fn={self.loss_fn!r} cannot be called; pass a function "
                "(outputs, microbatch) -> (sum, count) or None."
            )
        positive(first_step_timeout_s=self.first_step_timeout_s, step_timeout_s=self.step_timeout_s)

    def microbatches(self, stages: int) -> int:
        """Return the number of microbatches wanted with ``stages`` stages."""
        if self.num_microbatches is not None:
            return self.num_microbatches
        return DEFAULT_MICROBATCHES_PER_STAGE * stages

    def _check_recompute(self) -> None:
        if isinstance(self.recompute, str):
            one_of(["none", "full", "layer"], recompute=self.recompute)
            return
        named = [name for name in self.recompute if isinstance(name, str) and name]
        if not named or len(named) != len(self.recompute):
            raise ConfigError(
                f"recompute={list(self.recompute)!r} must list names of modules, such as "
                "['model.layers.*.mlp'], or be one of 'none', 'full', 'layer'."
            )

    def _check_partition(self) -> None:
        partition = self.partition
        if isinstance(partition, str):
            if partition not in ("balanced", "uniform"):
                raise ConfigError(
                    f"partition={partition!r} is not known; choose 'balanced', 'uniform', or list "
                    "the number of layers of each stage."
                )
            return
        if not partition:
            raise ConfigError("partition=[] is empty; list the number of layers of each stage.")
        for stage, layers in enumerate(partition):
            whole(**{f"partition[{stage}]": layers})
            if layers < 1:
                raise ConfigError(
                    f"partition={list(partition)} leaves stage {stage} without a layer; "
                    "every stage needs at least 1."
                )
