"""Settings of the pipeline, checked before any process group exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.partition import PARTITIONS
from goose_strategy.pipeline_parallel.program import chunks_of, is_file, read_schedule
from goose_strategy.validate import at_least, flag, one_of, positive, whole

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks

LossFunction: TypeAlias = Callable[[Any, dict[str, Any]], tuple[Tensor, Tensor]]
"""``loss_fn(outputs, microbatch) -> (sum of the losses, number of the summed items)``."""

DEFAULT_MICROBATCHES_PER_STAGE = 2
AUTO = "auto"
"""The schedule that is chosen at the set-up."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a model is cut in depth and how its stages take turns.

    At ``pp=1`` only `recompute` and `compile_layers` act.

    Attributes:
        schedule: In which order the stages take turns. ``"1F1B"`` (a stage holds activations of at
            most ``pp`` microbatches), ``"GPipe"`` (of all of them); with several stages per rank
            ``"Interleaved1F1B"`` or ``"LoopedBFS"``; with weight gradients as work of their own
            ``"ZBH1"``, ``"InterleavedZeroBubble"``, ``"ZBVZeroBubble"``, ``"DualPipeV"``,
            ``"VHalf"`` or ``"VMin"``; or the path of a ``.csv`` file in torch's format. ``"auto"``:
            rank 0 measures the model, simulates all of them, each with its own best partition, and
            takes the fastest that fits into the memory.
        stages_per_rank: Stages of every rank; the fewest that the schedule takes if ``None``, and
            any number with ``"auto"``.
        num_microbatches: Into how many parts a batch is cut along its rows; a batch of fewer rows
            is cut into its rows. ``None``: two per rank of the pipeline, or fewer for a smaller
            batch. Under 1F1B the idle share of a step
            is ``(pp - 1) / (num_microbatches + pp - 1)``.
        partition: ``"balanced"`` (the busiest rank has as little to do as whole layers allow, the
            head counted), ``"time"`` (the same, measured on rank 0's device), ``"memory"`` (the
            fullest rank holds as little as possible, activations under the schedule measured),
            ``"uniform"`` (the same number of layers), or the number of layers of each stage.
        example_shape: Rows and columns of the microbatch that is measured. ``None``: one row of 512
            tokens, or of the model's longest text if that is shorter.
        memory_limit_bytes: What each rank may hold with ``schedule="auto"``: weights, gradients,
            the optimizer's state and activations. ``None``: 90 % of what the fullest of the CUDA
            devices has free at the set-up; on other devices no limit.
        compile_layers: Compile the forward of each of the stack's layers by ``torch.compile``, with
            any ``pp``; ``True``, or the name of a backend. Not with schedules that put weight
            gradients off.
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
    partition: Literal["balanced", "uniform", "time", "memory"] | list[int] = "balanced"
    example_shape: tuple[int, int] | None = None
    memory_limit_bytes: int | None = None
    compile_layers: bool | str = False
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
        if self.schedule != AUTO:
            # Refuses what is wrong for any number of ranks.
            chunks_of(self.schedule, self._ranks_of_file() or 1, self.stages_per_rank)
        elif self.stages_per_rank is not None:
            whole(stages_per_rank=self.stages_per_rank)
            positive(stages_per_rank=self.stages_per_rank)
        if self.num_microbatches is not None:
            whole(num_microbatches=self.num_microbatches)
            at_least(1, num_microbatches=self.num_microbatches)
        self._check_file()
        self._check_partition()
        self._check_recompute()
        self._check_measured()
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise ConfigError(
                f"loss_fn={self.loss_fn!r} cannot be called; pass a function "
                "(outputs, microbatch) -> (sum, count) or None."
            )
        flag(trim_padding=self.trim_padding, return_logits=self.return_logits)
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

    def _check_measured(self) -> None:
        shape, limit = self.example_shape, self.memory_limit_bytes
        if shape is not None:
            if not isinstance(shape, (tuple, list)) or len(shape) != 2:
                raise ConfigError(f"example_shape={shape!r} must be (rows, columns), or None.")
            for name, size in zip(("rows", "columns"), shape, strict=True):
                whole(**{f"example_shape's {name}": size})
                positive(**{f"example_shape's {name}": size})
        if limit is not None:
            whole(memory_limit_bytes=limit)
            positive(memory_limit_bytes=limit)
            if self.schedule != AUTO:
                raise ConfigError(
                    f"memory_limit_bytes={limit} is for schedule='auto', but schedule="
                    f"{self.schedule!r}; leave one of them out."
                )
        if not isinstance(self.compile_layers, bool | str):
            raise ConfigError(
                f"compile_layers={self.compile_layers!r} must be true, false, or the name of a "
                "backend of torch.compile."
            )

    def _check_recompute(self) -> None:
        if isinstance(self.recompute, str):
            one_of(["none", "full", "layer"], recompute=self.recompute)
            return
        names = self.recompute if isinstance(self.recompute, list | tuple) else ()
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(
                f"recompute={self.recompute!r} must list names of modules, such as "
                "['model.layers.*.mlp'], or be one of 'none', 'full', 'layer'."
            )

    def _check_partition(self) -> None:
        partition = self.partition
        if isinstance(partition, str):
            if partition not in PARTITIONS:
                named = ", ".join(repr(name) for name in PARTITIONS)
                raise ConfigError(
                    f"partition={partition!r} is not known; choose {named}, or list the number of "
                    "layers of each stage."
                )
            return
        if not partition or not isinstance(partition, list | tuple):
            raise ConfigError(
                f"partition={partition!r} names no stages; list the number of layers of each stage."
            )
        for stage, layers in enumerate(partition):
            whole(**{f"partition[{stage}]": layers})
            if layers < 1:
                raise ConfigError(
                    f"partition={list(partition)} leaves stage {stage} without a layer; "
                    "every stage needs at least 1."
                )
