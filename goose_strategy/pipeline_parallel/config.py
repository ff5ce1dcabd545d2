"""Settings of the pipeline, checked before any process group exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.program import chunks_of, is_file, read_schedule
from goose_strategy.validate import at_least, one_of, positive, whole

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks

LossFunction: TypeAlias = Callable[[Any, dict[str, Any]], tuple[Tensor, Tensor]]
"""``loss_fn(outputs, microbatch) -> (sum of the losses, number of the summed items)``."""

DEFAULT_MICROBATCHES_PER_STAGE = 2


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a model is cut in depth and how its stages take turns. At ``pp=1`` only `recompute` acts.

    Attributes:
        schedule: In which order the stages take turns. ``"1F1B"`` (a stage holds activations of at
            most ``pp`` microbatches), ``"GPipe"`` (of all of them); with several stages per rank
            ``"Interleaved1F1B"`` or ``"LoopedBFS"``; with weight gradients as work of their own
            ``"ZBH1"``, ``"InterleavedZeroBubble"``, ``"ZBVZeroBubble"``, ``"DualPipeV"``,
            ``"VHalf"`` or ``"VMin"``; or the path of a ``.csv`` file in torch's format.
        stages_per_rank: Stages of every rank; the fewest that the schedule takes if ``None``.
        num_microbatches: Into how many parts a batch is cut along its rows; a batch of fewer rows
            is cut into its rows. ``None``: two per rank of the pipeline, or fewer for a smaller
            batch. Under 1F1B the idle share of a step
            is ``(pp - 1) / (num_microbatches + pp - 1)``.
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

    schedule: str = "1F1B"
    stages_per_rank: int | None = None
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
        if not isinstance(self.schedule, str):
            raise ConfigError(f"schedule={self.schedule!r} must be a name or the path of a file.")
        # Refuses what is wrong for any number of ranks.
        chunks_of(self.schedule, self._ranks_of_file() or 1, self.stages_per_rank)
        if self.num_microbatches is not None:
            whole(num_microbatches=self.num_microbatches)
            at_least(1, num_microbatches=self.num_microbatches)
        self._check_file()
        self._check_partition()
        self._check_recompute()
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ConfigError(
                f"loss_fn={self.loss_fn!r} cannot be called; pass a function "
                "(outputs, microbatch) -> (sum, count) or None."
            )
        positive(first_step_timeout_s=self.first_step_timeout_s, step_timeout_s=self.step_timeout_s)

    def microbatches(self, ranks: int) -> int:
        """Return the number of microbatches wanted with ``ranks`` ranks in the pipeline."""
        if self.num_microbatches is not None:
            return self.num_microbatches
        if is_file(self.schedule):
            return read_schedule(self.schedule).microbatches
        return DEFAULT_MICROBATCHES_PER_STAGE * ranks

    def chunks(self, ranks: int) -> Chunks:
        """Return which of ``ranks`` ranks holds which stages.

        Raises:
            ConfigError: If the schedule is not for as many ranks.
        """
        return chunks_of(self.schedule, ranks, self.stages_per_rank)

    def _ranks_of_file(self) -> int | None:
        return read_schedule(self.schedule).chunks.ranks if is_file(self.schedule) else None

    def _check_file(self) -> None:
        if not is_file(self.schedule):
            return
        given = read_schedule(self.schedule).microbatches
        if self.num_microbatches not in (None, given):
            raise ConfigError(
                f"num_microbatches={self.num_microbatches} does not fit "
                f"schedule={self.schedule!r}, which is for {given} microbatches."
            )

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
