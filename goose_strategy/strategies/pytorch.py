"""The Trainer door: ``Trainer(strategy=Goose3DStrategy(tp=2, pp=2))``, also from YAML.

A table of translations from the Trainer's hooks to the verbs of `ParallelRuntime`. The
LightningModule stays unmodified: its ``training_step`` calls the model and returns the loss, and
the schedule runs inside that call. A strategy that takes the step away from the module, as NeMo's
does, needs modules, losses and data of its own.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

# Not for type checking only: the command line reads the types of the constructor's arguments.
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment  # noqa: TC002
from lightning.pytorch.accelerators import Accelerator  # noqa: TC002
from lightning.pytorch.plugins.precision import Precision  # noqa: TC002
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from goose_strategy.errors import CheckpointError, ConfigError, PlanError
from goose_strategy.optim.config import ZeroConfig
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.privacy.config import PrivacyConfig  # noqa: TC001  the command line reads it
from goose_strategy.strategies import compat
from goose_strategy.strategies.door import (
    Door,
    build_config,
    wrong_door,
)
from goose_strategy.strategies.private import refuse_trainer
from goose_strategy.strategies.refusals import refuse_callbacks, refuse_twin_package
from goose_strategy.strategies.verbs import StrategyVerbs
from goose_strategy.tensor_parallel.config import TensorConfig

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Goose3DStrategy(StrategyVerbs, ParallelStrategy):
    """Megatron-style tensor x pipeline x data parallelism with ZeRO-1, for the Lightning Trainer.

    The data parallel size is what is left: ``devices * num_nodes / (tp * pp)``.

    Args:
        tp: Tensor parallel size.
        pp: Pipeline parallel size (number of stages).
        pipeline: Schedule, microbatches, partition.
        tensor: How layers are split.
        zero: Gradient buckets and the sharded optimizer.
        privacy: Differentially private training, or ``None``.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer; with gloo, a card may be listed several times.
        cluster_environment: How processes find each other; chosen by the Trainer if ``None``.
        checkpoint_io: Unused for sharded checkpoints.
        precision_plugin: Precision plugin; set by ``Trainer(precision=...)``.
        process_group_backend: ``"gloo"``, ``"nccl"``, or ``None`` for the device's default.
        timeout: Time after which a collective fails.

    Raises:
        ConfigError: If a setting is wrong; before any process group exists.
    """

    # The Trainer injects distributed samplers and honours sync_dist only where this is set.
    is_distributed = True

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
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        config = build_config(tp, pp, pipeline=pipeline, tensor=tensor, zero=zero, privacy=privacy)
        self._door = Door(config, backend=process_group_backend, timeout=timeout)
        self._num_nodes = 1
        self._ready = False
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )

    def __repr__(self) -> str:
        """Name the sizes and the door, because Lightning's refusal at the other door prints it."""
        config = self._door.config
        hint = wrong_door(
            "lightning.pytorch.Trainer (not pytorch_lightning)",
            "Goose3DStrategy",
            "Goose3DFabricStrategy",
        )
        return f"Goose3DStrategy(tp={config.tp}, pp={config.pp}) [{hint}]"

    @property
    @override
    def root_device(self) -> torch.device:
        if self.parallel_devices is None:
            raise RuntimeError("The devices are not known yet; pass the strategy to Trainer first.")
        return self._door.card(self.parallel_devices[self.local_rank])

    @property
    def num_nodes(self) -> int:
        """Number of nodes, set by the Trainer."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

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
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if precision_plugin is not None:
            self._door.prepare_precision(precision_plugin)
            self._take_over_clipping(precision_plugin)
        self._precision_plugin = precision_plugin

    def _take_over_clipping(self, plugin: Precision) -> None:
        """Route the plugin's clipping to the global norm.

        The Trainer asks the precision plugin, never the strategy, to clip; the plugin would clip
        every stage and shard by its own norm. Methods of the instance are replaced, so that its
        class stays what Lightning's own checks expect.
        """

        def by_norm(optimizer: Optimizer, clip_val: float) -> None:
            self.runtime.clip_grad_norm(
                compat.unwrap_optimizer(optimizer),
                float(clip_val),
                norm_type=2.0,
                error_if_nonfinite=False,
            )

        def by_value(optimizer: Optimizer, clip_val: float) -> None:
            self.runtime.clip_grad_value(compat.unwrap_optimizer(optimizer), float(clip_val))

        plugin.clip_grad_by_norm = by_norm  # type: ignore[method-assign]
        plugin.clip_grad_by_value = by_value  # type: ignore[method-assign]

    @override
    def connect(self, model: LightningModule) -> None:
        refuse_twin_package(model)
        self._ready = False
        super().connect(model)

    @override
    def _configure_launcher(self) -> None:
        self._door.check_sizes(self._num_nodes * self.num_processes, self.parallel_devices)
        if self.cluster_environment is not None:
            # Also in ranks that were started from outside: the launcher gives each its share of
            # the cores, without which every rank would use all of them.
            self._launcher = compat.TrainerScriptLauncher(
                self.cluster_environment, self.num_processes, self._num_nodes
            )

    def set_world_ranks(self) -> None:
        """Tell the cluster environment who this process is; called by the Trainer too."""
        compat.set_world_ranks(
            self.cluster_environment,
            rank=self.node_rank * self.num_processes + self.local_rank,
            world_size=self._num_nodes * self.num_processes,
        )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        self._door.start(self.cluster_environment, self.root_device, self.world_size)
        compat.set_device_mesh(self.lightning_module, self.runtime.mesh.device_mesh())

    @override
    def setup(self, trainer: Trainer) -> None:
        module = self._module()
        refuse_callbacks(trainer)
        if self._door.config.privacy is not None:
            refuse_trainer(trainer)
        self._door.adopt(trainer)
        if self.accelerator is not None:
            self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(module)
        self.runtime.shard_module(module, hook_forward=False)
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_optimizers_and_schedulers()
            with self.runtime.placeholders(module):
                self.setup_optimizers(trainer)
            self.runtime.attach_optimizers(module, compat.without_mocks(self.optimizers))
        self.setup_precision_plugin()
        self._ready = True

    @override
    def model_to_device(self) -> None:
        """Do nothing: only this rank's shard moves, in :meth:`setup`."""

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # The whole model is built on the host, never on the device, which holds only a shard.
        with self.precision_plugin.tensor_init_context():
            yield

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.runtime.before_step(self._module())
        return super().training_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        self.runtime.before_step(self._module())

    @override
    def on_test_start(self) -> None:
        self.runtime.before_step(self._module())

    @override
    def on_predict_start(self) -> None:
        self.runtime.before_step(self._module())

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        # Replicas may predict on different numbers of batches, so they must not wait for each
        # other inside the model.
        with self.runtime.local_loss(self._module()):
            return super().predict_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        with self.runtime.backward(closure_loss, self._module()):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Any,
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        return super().optimizer_step(compat.unwrap_optimizer(optimizer), closure, model, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        with self.runtime.no_sync(self._module(), enabled=True):
            yield

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._door.reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.runtime.vote(decision=decision, everyone=all)

    @override
    def barrier(self, name: str | None = None) -> None:
        self._door.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._door.broadcast(obj, src)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self._door.process_dataloader(dataloader)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return False

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        # The state lies in slices on all ranks; save_checkpoint collects it by parameter name.
        return {}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        # torch's checkpoint package costs half a second; most starts need none.
        from goose_strategy.strategies.trainer_state import save_trainer_state

        save_trainer_state(
            self.runtime, self._module(), checkpoint, filepath, storage_options=storage_options
        )

    @override
    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        from goose_strategy.strategies.trainer_state import load_trainer_state

        module = self._module()
        # After a fit the optimizers are still there, but testing a checkpoint is not resuming it.
        fitting = module.trainer.state.fn == TrainerFn.FITTING
        return load_trainer_state(
            self.runtime,
            module,
            compat.without_mocks(self.optimizers) if fitting else [],
            checkpoint_path,
            weights_only=weights_only,
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: :meth:`load_checkpoint` has filled this rank's shards already."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: :meth:`load_checkpoint` has filled this rank's shards already."""

    def export(self, module: nn.Module, path: Any, **settings: Any) -> None:
        """Write a set-up model for the hub; see `ParallelRuntime.export`. Collective."""
        self._door.export(module, path, settings)

    def export_adapter(self, module: nn.Module, path: Any, *, adapter: str = "default") -> None:
        """Write one adapter of peft's as ``PeftModel.from_pretrained`` loads it. Collective."""
        self.runtime.export_adapter(compat.unwrap_module(module), path, adapter=adapter)

    @override
    def on_exception(self, exception: BaseException) -> None:
        # Refusals of a setting, a model or a checkpoint are raised on all ranks, and so is
        # whatever happens before the set-up has ended: nobody waits for this rank then.
        if self._ready and not isinstance(exception, (ConfigError, PlanError, CheckpointError)):
            self.runtime.fail(exception)

    @override
    def teardown(self) -> None:
        # The groups and the shards stay, because validate() or test() may follow on this model.
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()

    def _module(self) -> LightningModule:
        if self.lightning_module is None:
            raise RuntimeError("No LightningModule is connected; call trainer.fit(model) first.")
        return self.lightning_module
