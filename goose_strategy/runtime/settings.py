"""Settings of the runtime, checked before any process group exists."""

from __future__ import annotations

from dataclasses import dataclass, field

from goose_strategy.errors import ConfigError
from goose_strategy.optim.config import ZeroConfig
from goose_strategy.pipeline_parallel.compiled import refuse_split
from goose_strategy.pipeline_parallel.config import AUTO, PipelineConfig
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.privacy.config import PrivacyConfig
from goose_strategy.tensor_parallel.config import TensorConfig
from goose_strategy.validate import at_least, whole


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Sizes of the mesh and one settings object per room.

    Attributes:
        tp: Tensor parallel size (ranks that split one layer).
        pp: Pipeline parallel size (stages).
        pipeline: Schedule, microbatches, partition.
        tensor: How layers are split.
        zero: Gradient buckets and the sharded optimizer.
        privacy: Private training, or ``None``.

    The data parallel size is what is left of the world: ``world_size / (tp * pp)``.
    """

    tp: int = 1
    pp: int = 1
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    tensor: TensorConfig = field(default_factory=TensorConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    privacy: PrivacyConfig | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without a model or a process group.

        Raises:
            ConfigError: If a size is no positive whole number, the schedule is for another ``pp``,
                a listed partition does not name one count per stage, ``recompute="full"`` has no
                stages, a room's settings are no settings of that room, or private training would
                have rounded sums.
        """
        self._check_rooms()
        self._check_privacy()
        whole(tp=self.tp, pp=self.pp)
        at_least(1, tp=self.tp, pp=self.pp)
        if self.pp == 1 and self.pipeline.recompute == "full":
            raise ConfigError(
                "recompute='full' runs a stage again while its gradient is on its way, but pp=1 "
                "has no stages; use recompute='layer'."
            )
        if self.pipeline.schedule == AUTO and self.pp > 1:
            return
        chunks = self.pipeline.chunks(self.pp) if self.pp > 1 else Chunks(1)
        if self.pp > 1 and self.pipeline.compile_layers:
            refuse_split(self.pipeline.schedule, f"compile_layers={self.pipeline.compile_layers!r}")
        partition = self.pipeline.partition
        if not isinstance(partition, str) and len(partition) != chunks.stages:
            raise ConfigError(
                f"partition={list(partition)} lists {len(partition)} stages but "
                f"{chunks.describe()}; list one number of layers per stage."
            )

    def _check_rooms(self) -> None:
        kinds = (("pipeline", PipelineConfig), ("tensor", TensorConfig), ("zero", ZeroConfig))
        for name, kind in kinds:
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ConfigError(
                    f"{name}={value!r} must be a {kind.__name__}; write {name}={kind.__name__}(...)"
                    " with its settings, or leave it out."
                )

    def _check_privacy(self) -> None:
        if self.privacy is None:
            return
        # Anything but None would train under no promise.
        if not isinstance(self.privacy, PrivacyConfig):
            raise ConfigError(
                f"privacy={self.privacy!r} must be a PrivacyConfig, or None for ordinary training."
            )
        for name, value in (("grads", self.zero.grads), ("wire", self.zero.wire)):
            if value != "fp32":
                raise ConfigError(
                    f"{name}={value!r} rounds sums of clipped gradients, whose size the noise "
                    f"relies on; private training takes {name}='fp32'."
                )
