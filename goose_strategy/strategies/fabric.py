"""The Fabric door: ``Fabric(strategy=Goose3DFabricStrategy(tp=2, pp=2))``.

A table of translations from Fabric's hooks to the verbs of `ParallelRuntime`. Lightning's own
``ModelParallelStrategy`` needs a plan written by the user, knows no pipeline and leaves the
optimizer with stale parameters in a joint set-up; this one takes the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

# Not for type checking only: the command line reads the types of the constructor's arguments.
from lightning.fabric.accelerators import Accelerator  # noqa: TC002
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision  # noqa: TC002
from lightning.fabric.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from typing_extensions import override

from goose_strategy.optim.config import ZeroConfig
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.privacy.config import PrivacyConfig  # noqa: TC001  the command line reads it
from goose_strategy.strategies import compat
from goose_strategy.strategies.door import (
    Door,
    build_config,
    wrong_door,
)
from goose_strategy.strategies.verbs import StrategyVerbs
from goose_strategy.tensor_parallel.config import TensorConfig

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from goose_strategy.runtime.core import ParallelRuntime


class Goose3DStrategy(StrategyVerbs, ParallelStrategy):
    """Megatron-style tensor x pipeline x data parallelism with ZeRO-1, for Lightning Fabric.

    Exported as ``goose_strategy.Goose3DFabricStrategy``. The data parallel size is what is left:
    ``devices * num_nodes / (tp * pp)``.

    Args:
        tp: Tensor parallel size.
        pp: Pipeline parallel size (number of stages).
        pipeline: Schedule, microbatches, partition.
        tensor: How layers are split.
        zero: Gradient buckets and the sharded optimizer.
        privacy: Differentially private training, or ``None``.
        accelerator: Set by Fabric.
        parallel_devices: Set by Fabric; with gloo, a card may be listed several times.
        cluster_environment: How processes find each other; chosen by Fabric if ``None``.
        checkpoint_io: Unused for sharded checkpoints.
        precision: Precision plugin; set by ``Fabric(precision=...)``.
        process_group_backend: ``"gloo"``, ``"nccl"``, or ``None`` for the device's default.
        timeout: Time after which a collective fails.

    Raises:
        ConfigError: If a setting is wrong; before any process group exists.
    """

    def __init__(  # noqa: PLR0913  the last seven are Lightning's own keywords, spelled out
        self,
        tp: int = 1,
        pp: int = 1,
        *,
        pipeline: PipelineConfig = PipelineConfig(),
        tensor: TensorConfig = TensorConfig(),
        zero: ZeroConfig = ZeroConfig(),
        privacy: PrivacyConfig | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        config = build_config(tp, pp, pipeline=pipeline, tensor=tensor, zero=zero, privacy=privacy)
        self._door = Door(config, backend=process_group_backend, timeout=timeout)
        self._num_nodes = 1
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._backward_sync_control = _SyncControl(self._door.runtime)

    def __repr__(self) -> str:
        """Name the sizes and the door, because Lightning's refusal at the other door prints it."""
        config = self._door.config
        hint = wrong_door("lightning.fabric.Fabric", "Goose3DFabricStrategy", "Goose3DStrategy")
        return f"Goose3DFabricStrategy(tp={config.tp}, pp={config.pp}) [{hint}]"

    @property
    @override
    def root_device(self) -> torch.device:
        if self.parallel_devices is None:
            raise RuntimeError("The devices are not known yet; pass the strategy to Fabric first.")
        return self._door.card(self.parallel_devices[self.local_rank])

    @property
    def num_nodes(self) -> int:
        """Number of nodes, set by Fabric."""
        return self._num_nodes

    @property
    def num_processes(self) -> int:
        """Number of processes on this node."""
        return len(self.parallel_devices or ())

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self._door.sampler_kwargs(self.global_rank, self.world_size)

    @property
    @override
    def precision(self) -> Precision:
        return super().precision

    @precision.setter
    @override
    def precision(self, precision: Precision | None) -> None:
        if precision is not None:
            self._door.prepare_precision(precision)
        self._precision = precision

    @override
    def _configure_launcher(self) -> None:
        self._door.check_sizes(self._num_nodes * self.num_processes, self.parallel_devices)
        if self.cluster_environment is not None:
            # Also in ranks that were started from outside: the launcher gives each its share of
            # the cores, without which every rank would use all of them.
            self._launcher = compat.FabricScriptLauncher(
                self.cluster_environment, self.num_processes, self._num_nodes
            )

    def _set_world_ranks(self) -> None:
        compat.set_world_ranks(
            self.cluster_environment,
            rank=self.node_rank * self.num_processes + self.local_rank,
            world_size=self._num_nodes * self.num_processes,
        )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._set_world_ranks()
        self._door.start(self.cluster_environment, self.root_device, self.world_size)

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        self.runtime.shard_module(module)
        return module

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        self.runtime.shard_module(module, optimizers=optimizers)
        return module, optimizers, scheduler

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.runtime.attach_optimizer(optimizer)
        return optimizer

    @override
    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: only this rank's shard moves, in :meth:`setup_module`."""

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        # The whole model is built on the host, never on the device, which holds only a shard.
        return self.precision.module_init_context()

    @override
    def process_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        loader: DataLoader[Any] = self._door.process_dataloader(dataloader)
        return loader

    @override
    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        with self.runtime.backward(tensor, module):
            super().backward(tensor, module, *args, **kwargs)

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        return self.runtime.clip_grad_norm(
            compat.unwrap_optimizer(optimizer),
            float(max_norm),
            norm_type=float(norm_type),
            error_if_nonfinite=error_if_nonfinite,
        )

    @override
    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        self.runtime.clip_grad_value(compat.unwrap_optimizer(optimizer), float(clip_val))

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._door.reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.runtime.vote(decision=decision, everyone=all)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._door.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._door.broadcast(obj, src)

    @override
    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return compat.unwrap_optimizer(optimizer).state_dict()

    @override
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        # torch's checkpoint package costs half a second; most starts need none.
        from goose_strategy.strategies.fabric_state import save_fabric_state

        save_fabric_state(
            self.runtime, path, state, storage_options=storage_options, filters=filter
        )

    @override
    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        from goose_strategy.strategies.fabric_state import load_fabric_state

        return load_fabric_state(
            self.runtime, path, state, strict=strict, weights_only=weights_only
        )

    def export(self, module: nn.Module, path: Any, **settings: Any) -> None:
        """Write a set-up model for the hub; see `ParallelRuntime.export`. Collective."""
        self._door.export(module, path, settings)

    def export_adapter(self, module: nn.Module, path: Any, *, adapter: str = "default") -> None:
        """Write one adapter of peft's as ``PeftModel.from_pretrained`` loads it. Collective."""
        self.runtime.export_adapter(compat.unwrap_module(module), path, adapter=adapter)

    @override
    def teardown(self) -> None:
        self.runtime.stop()
        super().teardown()


class _SyncControl(compat.BackwardSyncControl):
    """``fabric.no_backward_sync``: keep this rank's gradients local until the next sync."""

    def __init__(self, runtime: ParallelRuntime) -> None:
        self._runtime = runtime

    @override
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._runtime.no_sync(module, enabled=enabled)
