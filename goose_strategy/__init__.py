"""goose-strategy: Megatron-style 3D parallelism with ZeRO-1 as a Lightning strategy.

Importing this package registers ``strategy="goose3d"`` for Fabric and the Trainer. Everything
else is imported when it is first used, so that the import stays cheap.
"""

from typing import TYPE_CHECKING

from goose_strategy.lazy import lazy_exports
from goose_strategy.strategies.registry import register

if TYPE_CHECKING:
    from goose_strategy.errors import GooseError
    from goose_strategy.hub.pretrained import from_pretrained
    from goose_strategy.optim.config import ZeroConfig
    from goose_strategy.optim.lion import Lion
    from goose_strategy.pipeline_parallel.config import PipelineConfig
    from goose_strategy.pipeline_parallel.hooks import (
        PipelineCallback,
        PipelineEvent,
        PipelineStep,
    )
    from goose_strategy.runtime.core import ParallelRuntime
    from goose_strategy.runtime.settings import RuntimeConfig
    from goose_strategy.strategies.fabric import Goose3DStrategy as Goose3DFabricStrategy
    from goose_strategy.strategies.progress import Goose3DProgressBar
    from goose_strategy.strategies.pytorch import Goose3DStrategy
    from goose_strategy.strategies.timeline import TimelineRecorder
    from goose_strategy.tensor_parallel.config import TensorConfig

__all__ = [
    "Goose3DFabricStrategy",
    "Goose3DProgressBar",
    "Goose3DStrategy",
    "GooseError",
    "Lion",
    "ParallelRuntime",
    "PipelineCallback",
    "PipelineConfig",
    "PipelineEvent",
    "PipelineStep",
    "RuntimeConfig",
    "TensorConfig",
    "TimelineRecorder",
    "ZeroConfig",
    "from_pretrained",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Goose3DFabricStrategy": "goose_strategy.strategies.fabric:Goose3DStrategy",
        "Goose3DProgressBar": "goose_strategy.strategies.progress:Goose3DProgressBar",
        "Goose3DStrategy": "goose_strategy.strategies.pytorch:Goose3DStrategy",
        "GooseError": "goose_strategy.errors:GooseError",
        "Lion": "goose_strategy.optim.lion:Lion",
        "ParallelRuntime": "goose_strategy.runtime.core:ParallelRuntime",
        "PipelineCallback": "goose_strategy.pipeline_parallel.hooks:PipelineCallback",
        "PipelineConfig": "goose_strategy.pipeline_parallel.config:PipelineConfig",
        "PipelineEvent": "goose_strategy.pipeline_parallel.hooks:PipelineEvent",
        "PipelineStep": "goose_strategy.pipeline_parallel.hooks:PipelineStep",
        "RuntimeConfig": "goose_strategy.runtime.settings:RuntimeConfig",
        "TensorConfig": "goose_strategy.tensor_parallel.config:TensorConfig",
        "TimelineRecorder": "goose_strategy.strategies.timeline:TimelineRecorder",
        "ZeroConfig": "goose_strategy.optim.config:ZeroConfig",
        "from_pretrained": "goose_strategy.hub.pretrained:from_pretrained",
    },
)

register()
