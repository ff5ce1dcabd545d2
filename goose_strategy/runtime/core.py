"""The runtime: the mesh, the models sharded over it, and the verbs of a training step.

Both of Lightning's doors translate to these verbs, and a plain torch loop can call them directly:

    runtime = ParallelRuntime(RuntimeConfig(tp=2, pp=2))
    runtime.start(torch.device("cpu"))            # after torch.distributed.init_process_group
    optimizer = torch.optim.AdamW(model.parameters())
    runtime.shard_module(model, optimizers=[optimizer])
    loss = model(**batch).loss                    # the whole schedule runs here
    with runtime.backward(loss):
        loss.backward()                           # releases the gradients
    runtime.clip_grad_norm(optimizer, 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.comm.watchdog import Watchdog
from goose_strategy.compat.torch import default_store
from goose_strategy.errors import ConfigError, MeshError
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.pipeline_parallel.hooks import PipelineHooks
from goose_strategy.privacy.ledger import Ledger
from goose_strategy.runtime.model import ShardedModel
from goose_strategy.runtime.optimizing import OptimizerVerbs
from goose_strategy.runtime.private import ledger_for

if TYPE_CHECKING:
    import os

    from goose_strategy.runtime.dropout import DropoutStream
    from goose_strategy.runtime.settings import RuntimeConfig

_DEFAULT_TIMEOUT = timedelta(minutes=30)


class ParallelRuntime(OptimizerVerbs):
    """Tensor x pipeline x data parallel training of modules, without Lightning.

    Args:
        config: Sizes of the mesh and settings of each room.
    """

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.models: list[ShardedModel] = []
        self.hooks = PipelineHooks()
        self._mesh: ParallelMesh | None = None
        self._watchdog: Watchdog | None = None
        self.ledger: Ledger | None = None
        self._broadcast_batches = False
        self._sharded = 0

    @property
    def started(self) -> bool:
        """Whether the mesh exists."""
        return self._mesh is not None

    @property
    @override
    def mesh(self) -> ParallelMesh:
        """The mesh.

        Raises:
            MeshError: Before :meth:`start`.
        """
        if self._mesh is None:
            raise MeshError(
                "The mesh does not exist yet; it is built when the processes are launched "
                "(fabric.launch(), trainer.fit(), or ParallelRuntime.start())."
            )
        return self._mesh

    def check_world(self, world_size: int) -> MeshLayout:
        """Return the layout for ``world_size`` ranks; needs no process group.

        Raises:
            ConfigError: If ``tp * pp`` does not divide ``world_size``.
        """
        return MeshLayout.from_world(world_size, tp=self.config.tp, pp=self.config.pp)

    def start(self, device: torch.device, *, timeout: timedelta = _DEFAULT_TIMEOUT) -> None:
        """Build the mesh and start the watchdog. Collective over the world.

        Args:
            device: Device of this rank.
            timeout: Time after which a collective fails.

        Raises:
            ConfigError: If the sizes do not divide the world.
        """
        if self.started:
            return
        layout = self.check_world(torch.distributed.get_world_size())
        privacy = self.config.privacy
        self._mesh = ParallelMesh.create(
            layout, device=device, timeout=timeout, norms=privacy is not None
        )
        if privacy is not None:
            former, self.ledger = self.ledger, Ledger(privacy, self._mesh.control)
            # What was spent before a stop stays spent.
            self.ledger.load_state_dict(None if former is None else former.state_dict())
        self.hooks.mesh, pipeline = self._mesh, self.config.pipeline
        self._watchdog = Watchdog(
            self._mesh,
            store=default_store(),
            first_step_timeout_s=pipeline.first_step_timeout_s,
            step_timeout_s=pipeline.step_timeout_s,
        )

    def shard_module(
        self,
        module: nn.Module,
        *,
        optimizers: Sequence[Optimizer] = (),
        hook_forward: bool = True,
    ) -> ShardedModel:
        """Shard a module in place over the mesh. Collective over the world.

        Args:
            module: Any module at ``tp=pp=1``; one that holds a transformers causal LM else. Its
                class, its config and the names of its parameters stay.
            optimizers: Optimizers over its parameters; their ``param_groups`` are rewritten to
                the parameters that this rank keeps.
            hook_forward: Share buffers whenever the module itself is called. Off for callers that
                announce every step by `before_step`.

        Returns:
            The handle of the sharded module; the same one if it was sharded before.

        Raises:
            PlanError: If the module cannot be split as asked.
            ConfigError: If an optimizer is unsupported or holds foreign parameters.
        """
        known = self.model_of(module)
        if known is None:
            self._sharded += 1
            known = ShardedModel(module, self.mesh, self.config, self._watchdog, self._sharded)
            known.hooks, known.scaler = self.hooks, self.scaler
            known.ledger = ledger_for(self.ledger, self.models, module)
            known.shard(optimizers, hook_forward=hook_forward)
            known.guard.mode = "broadcast" if self._broadcast_batches else "check"
            # One that was sharded anew by another runtime has been closed here.
            self.models = [*(model for model in self.models if not model.closed), known]
        elif optimizers:
            known.attach(optimizers)
        return known

    def model_of(self, module: nn.Module) -> ShardedModel | None:
        """Return the handle of ``module`` if it is sharded by this runtime."""
        alive = (model for model in self.models if not model.closed)
        return next((model for model in alive if model.module is module), None)

    @property
    def dropout_streams(self) -> list[DropoutStream]:
        """The random numbers of every sharded module's calls, in the order of the set-ups."""
        return [model.dropout for model in self.models if not model.closed]

    def attach_optimizers(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Attach optimizers that were made after ``module`` was sharded."""
        self._known(module).attach(optimizers)

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Attach one optimizer to the sharded module whose parameters it holds.

        Raises:
            ConfigError: If it holds parameters of no sharded module, or of several.
        """
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owners = [m for m in self.models if held & {id(p) for p in m.module.parameters()}]
        if len(owners) != 1:
            raise ConfigError(
                f"{type(optimizer).__name__} holds parameters of {len(owners)} sharded modules; "
                "set the module up first (fabric.setup_module(model)) and build the optimizer "
                "from the parameters of exactly that module, or set both up together "
                "(fabric.setup(model, optimizer))."
            )
        owners[0].add(optimizer)

    @contextmanager
    def placeholders(self, module: nn.Module) -> Generator[None, None, None]:
        """Let optimizers be built inside the block over modules that other stages hold."""
        model = self.model_of(module)
        if model is None:
            yield
            return
        with model.surgery.placeholders():
            yield

    def before_step(self, module: nn.Module) -> None:
        """Prepare a module whose own ``forward`` a training step may bypass."""
        model = self.model_of(module)
        if model is not None:
            model.before_forward()

    @contextmanager
    def backward(
        self, loss: Tensor, module: nn.Module | None = None
    ) -> Generator[None, None, None]:
        """Surround ``loss.backward()``: check the loss, then finish the gradient reduction.

        Args:
            loss: What ``backward()`` will be called on.
            module: The module it belongs to; all sharded modules if ``None`` or unknown. What
                reaches others is reduced when they are clipped or stepped.

        Raises:
            BatchError: If ``pp > 1`` and ``loss`` does not come from a pipelined call.
            RuntimeError: If it was released before, or its forward ran with another setting of
                `no_sync`.
        """
        known = None if module is None else self.model_of(module)
        models = [model for model in self.models if not model.closed] if known is None else [known]
        # Outside of the watched section: an error that every rank raises here ends nobody.
        for model in models:
            model.check_loss(loss)
            model.prepare_gradients()
        with self.watch("backward"):
            yield
            for model in models:
                model.after_backward()

    @contextmanager
    def no_sync(self, module: nn.Module, *, enabled: bool = True) -> Generator[None, None, None]:
        """Keep gradients local to this rank inside the block, for accumulation."""
        models = [m for m in self.models if m.module is module] or self.models
        before = [model.sync for model in models]
        for model in models:
            model.sync = not enabled
        try:
            yield
        finally:
            for model, sync in zip(models, before, strict=True):
                model.sync = sync

    @contextmanager
    def local_loss(self, module: nn.Module) -> Generator[None, None, None]:
        """Let replicas compute losses of their own inside the block, without dp communication."""
        model = self.model_of(module)
        if model is None:
            yield
            return
        before, model.global_loss = model.global_loss, False
        try:
            yield
        finally:
            model.global_loss = before

    @contextmanager
    @override
    def watch(self, what: str) -> Generator[None, None, None]:
        """Guard a block by the watchdog's deadline."""
        with nullcontext() if self._watchdog is None else self._watchdog.guard(what):
            yield

    def export(self, module: nn.Module, path: str | os.PathLike[str], **settings: Any) -> None:
        """Write the causal LM of a sharded module as a Hugging Face checkpoint. Collective.

        Args:
            module: The sharded module, or the model in it.
            path: The folder that will appear, on a file system that all ranks share.
            **settings: Of :class:`~goose_strategy.hub.config.ExportConfig`: ``dtype``,
                ``max_shard_size``, ``overwrite``, ``tokenizer``.

        Raises:
            ConfigError: If the module is not sharded here, or a setting is wrong.
            CheckpointError: On all ranks, if something is in the way, or writing failed on one.
        """
        # torch's checkpoint package costs half a second; most starts need none.
        from goose_strategy.hub.config import ExportConfig
        from goose_strategy.runtime.export import export_model

        # Also the model inside of what was set up: a LightningModule's, say.
        holders = (m for m in self.models if any(module is one for one in m.module.modules()))
        model = next(holders, None)
        if model is None:
            raise ConfigError("The module is not sharded by this runtime; set it up first.")
        model.synchronize()
        export_model(model, path, ExportConfig.of(settings))

    def vote(self, *, decision: bool, everyone: bool) -> bool:
        """Return whether all (``everyone``) or any ranks of the world decided yes. Collective."""
        value = torch.tensor([int(decision)], dtype=torch.int64)
        all_reduce(value, self.mesh.control, op="min" if everyone else "max")
        return bool(value.item())

    def export_adapter(
        self, module: nn.Module, path: str | os.PathLike[str], *, adapter: str = "default"
    ) -> None:
        """Write one adapter as ``PeftModel.from_pretrained`` loads it. Collective.

        Args:
            module: A sharded module that holds one ``PeftModel``.
            path: The folder.
            adapter: Name of the adapter.

        Raises:
            ConfigError: If the module is not sharded here, or there is no such adapter.
            CheckpointError: If writing failed; on all ranks.
        """
        # torch's checkpoint package costs half a second; most starts need none.
        from goose_strategy.runtime.adapters import export_adapter

        export_adapter(self._known(module), path, adapter=adapter)

    @contextmanager
    def merged_adapters(self, module: nn.Module) -> Generator[None, None, None]:
        """Merge a module's active adapters into its weights inside the block."""
        from goose_strategy.runtime.adapters import merged_adapters

        with merged_adapters(self._known(module)):
            yield

    def _known(self, module: nn.Module) -> ShardedModel:
        model = self.model_of(module)
        if model is None:
            raise ConfigError("The module is not sharded by this runtime; call shard_module first.")
        model.synchronize()
        return model

    def broadcast_batches(self) -> None:
        """From now on, send the first rank's batch to the others of its model replica."""
        self._broadcast_batches = True
        for model in self.models:
            model.guard.mode = "broadcast"

    def fail(self, exception: BaseException) -> None:
        """Tell the other ranks that this one failed, so that all end with the first cause."""
        if self._watchdog is not None:
            self._watchdog.fail(exception)

    def stop(self) -> None:
        """Undo the patches, stop the watchdog, close the groups."""
        for model in self.models:
            model.close()
        self.models.clear()
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None
