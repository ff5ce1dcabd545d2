"""One sharded module: its surgery, its gradients, its optimizers, its calls.

Everything that belongs to one module lives here and not in the strategy, so that a script may set
up several (a generator and a critic, a student and a teacher) without one overwriting the other.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from goose_strategy.data_parallel.reducer import Reducer
from goose_strategy.errors import ConfigError
from goose_strategy.hub.read import check_readable, fingerprints, is_unread, while_cut
from goose_strategy.optim.storage import is_native
from goose_strategy.optim.supported import check_supported
from goose_strategy.optim.zero import dtypes_of
from goose_strategy.pipeline_parallel.hooks import PipelineHooks
from goose_strategy.runtime.batch import Batch, BatchGuard
from goose_strategy.runtime.calls import connect_calls
from goose_strategy.runtime.dropout import DropoutStream
from goose_strategy.runtime.filling import fill, refuse_unfilled
from goose_strategy.runtime.forward import DirectForward, PipelinedForward, uncompiled
from goose_strategy.runtime.naming import (
    GroupNames,
    check_storages,
    check_ties,
    orders_of,
    owners,
    record_groups,
    refill_groups,
    strip_placeholders,
)
from goose_strategy.runtime.pipeline import PipelineCall, check_releases
from goose_strategy.runtime.replicate import (
    broadcast_buffers,
    buffer_places,
    equalize,
    share_random_state,
)
from goose_strategy.runtime.stepping import WatchedShards, native_on_any_rank
from goose_strategy.runtime.stray import refuse_strays
from goose_strategy.runtime.surgery import Surgery, operate
from goose_strategy.runtime.verdict import agreed, equal_everywhere

if TYPE_CHECKING:
    from goose_strategy.comm.watchdog import Watchdog
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.optim.scaler import LossScaler
    from goose_strategy.privacy.ledger import Ledger
    from goose_strategy.runtime.counting import TokenCount
    from goose_strategy.runtime.private import PrivateTraining
    from goose_strategy.runtime.settings import RuntimeConfig

_MARK = "_goose_sharded"


class ShardedModel:
    """A module sharded in place, and everything that trains it.

    Args:
        module: The user's module.
        mesh: The mesh.
        config: Settings of the runtime.
        watchdog: Watches over blocks that may hang, or ``None``.
        ordinal: Number of the module in its script.

    Attributes:
        module: The user's module; its class and names stay.
        optimizers: Optimizers attached to it.
        sync: Whether the next backward reduces gradients over dp.
        global_loss: Whether a causal LM's loss is summed over the replicas.
        guard: Compares batches over the ranks of one replica.
        hooks: Callbacks around the actions of a pipeline; set before `shard`.
        ledger: The privacy of the run, if there is any; set before `shard`.
        scaler: Scales losses in mixed precision with fp16, if that is so; set before `shard`.
        closed: Whether the module was given back.
        unfilled: Parameters and buffers that hold NaN until a checkpoint is loaded: the module
            was on the meta device, and not made by `from_pretrained`.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        config: RuntimeConfig,
        watchdog: Watchdog | None,
        ordinal: int = 0,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.config = config
        self.optimizers: list[Optimizer] = []
        self.shards: list[WatchedShards] = []
        self.reducer: Reducer | None = None
        self.sync = True
        self.global_loss = True
        self.hooks = PipelineHooks()
        self.scaler: LossScaler | None = None
        self.guard = BatchGuard(mesh, self.watch)
        self._watchdog = watchdog
        self._ordinal = ordinal
        self._dropout: DropoutStream | None = None
        self._surgery: Surgery | None = None
        self._pipeline: PipelineCall | None = None
        self._count: TokenCount | None = None
        self._private: PrivateTraining | None = None
        self.ledger: Ledger | None = None
        self._buffers: list[tuple[nn.Module, str]] = []
        self._buffers_changed = False
        self._orders: dict[Optimizer | None, dict[str, int]] = {}
        self._undo = ExitStack()
        self.closed = False
        self.unfilled: list[str] = []

    @property
    def surgery(self) -> Surgery:
        """What was done to the module."""
        if self._surgery is None:
            raise ConfigError("The module is not sharded yet.")
        return self._surgery

    @property
    def dropout(self) -> DropoutStream:
        """The random numbers of the module's calls."""
        if self._dropout is None:
            raise ConfigError("The module is not sharded yet.")
        return self._dropout

    def shard(self, optimizers: Sequence[Optimizer] = (), *, hook_forward: bool = True) -> None:
        """Shard the module in place, patch its forward, attach the optimizers. Collective.

        Args:
            optimizers: Optimizers over the whole module.
            hook_forward: Share buffers whenever the module itself is called; off where
                `before_forward` is called at every step instead.
        """
        former = vars(self.module).get(_MARK)
        if isinstance(former, ShardedModel) and former.module is self.module:
            former.give_up()
        recorded = agreed(self.mesh, lambda: self._check(optimizers))
        equal_everywhere(self.mesh, fingerprints(self.module), "the checkpoint's files")
        self._orders = orders_of(self.module, optimizers, recorded)
        equalize(self.module, self.mesh)
        share_random_state(self.mesh)
        self._dropout = DropoutStream(self.mesh, self._ordinal, self.watch)
        with while_cut(self.module):
            self._surgery = agreed(
                self.mesh,
                lambda: operate(self.module, self.mesh, self.config, count=self._wait_count),
            )
        if is_unread(self.module):
            self.unfilled = agreed(
                self.mesh, lambda: fill(self.module, self.surgery.specs, self.mesh.device)
            )
        self.module.to(self.mesh.device)
        vars(self.module)[_MARK] = self
        self._undo.callback(vars(self.module).pop, _MARK, None)
        self._buffers = buffer_places(self.module)
        self._install(hook_forward=hook_forward)
        if optimizers:
            refill_groups(self.module, optimizers, recorded, self.surgery.tied)
            self.attach(optimizers)

    def _check(self, optimizers: Sequence[Optimizer]) -> list[GroupNames]:
        """Refuse what can be refused before anything is changed; return names by group."""
        for module in self.module.modules():
            if isinstance(vars(module).get("forward"), (DirectForward, PipelinedForward)):
                raise ConfigError(
                    f"{type(module).__name__} is sharded already, as a part of another module; "
                    "set up the outermost module, once."
                )
        check_storages(self.module)
        for optimizer in optimizers:
            check_supported(optimizer)
            is_native(self.config.zero, optimizer, dtypes_of(optimizer))
        check_readable(self.module)
        return record_groups(self.module, optimizers)

    def check_filled(self) -> None:
        """Refuse to compute with, or to save, weights that were never loaded.

        Raises:
            ConfigError: If there are some.
        """
        refuse_unfilled(self.unfilled)

    def give_up(self) -> None:
        """Make way for another strategy that wants to shard the same module.

        Raises:
            ConfigError: If the module is cut into stages: what other stages hold is gone from it.
        """
        if self.surgery.part is not None:
            raise ConfigError(
                f"{type(self.module).__name__} was cut into pp={self.mesh.pp_size} stages by "
                "another strategy and cannot be set up again; go on with the same Fabric or "
                "Trainer, or save a checkpoint and load it into a new module."
            )
        self.close()

    def _install(self, *, hook_forward: bool) -> None:
        self._pipeline, self._private = connect_calls(self, self._watchdog, self._undo)
        refuse_strays(self, self._undo)
        if hook_forward:
            handle = self.module.register_forward_pre_hook(self._before_call)
            self._undo.callback(handle.remove)
        for module in self.module.modules() if self.config.zero.overlap_param_gather else ():
            handle = module.register_state_dict_pre_hook(lambda *_: self.synchronize())
            self._undo.callback(handle.remove)

    @uncompiled
    def _before_call(self, module: nn.Module, _args: object) -> None:
        # A deep copy of the module has the hook too.
        if module is self.module:
            self.before_forward()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        """Return itself: a copy of the module is a module of its own, and this is no part of it."""
        return self

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Attach all optimizers of the module, in place of those attached before. Collective.

        Raises:
            ConfigError: If one is unsupported or holds foreign parameters; nothing is changed then.
        """
        strip_placeholders(optimizers)
        owned = self._owned(optimizers)
        native = native_on_any_rank(optimizers, self.config.zero, self.mesh)
        self._detach()
        self.optimizers = list(optimizers)
        reducer = self._build_reducer(owned)
        pairs = zip(self.optimizers, native, strict=True)
        self.shards = [self._shards_for(reducer, o, n) for o, n in pairs]

    def _shards_for(self, reducer: Reducer, optimizer: Optimizer, native: bool) -> WatchedShards:  # noqa: FBT001
        privatize = None if self._private is None else self._private.privatize
        return WatchedShards(reducer, optimizer, self.watch, native=native, privatize=privatize)

    def add(self, optimizer: Optimizer) -> None:
        """Attach one more optimizer; those attached before keep their state. Collective.

        Raises:
            ConfigError: If it is unsupported or holds foreign parameters; nothing is changed then.
        """
        if self.reducer is None:
            self.attach([*self.optimizers, optimizer])
            return
        strip_placeholders([optimizer])
        self._owned([*self.optimizers, optimizer])
        (native,) = native_on_any_rank([optimizer], self.config.zero, self.mesh)
        self.shards.append(self._shards_for(self.reducer, optimizer, native))
        self.optimizers.append(optimizer)

    def _owned(self, optimizers: Sequence[Optimizer]) -> dict[str, tuple[int, int]]:
        """Check optimizers on all ranks; return optimizer and group by parameter name."""

        def check() -> dict[str, tuple[int, int]]:
            if self._private is not None:
                self._private.check_single(optimizers)
            for optimizer in optimizers:
                check_supported(optimizer)
            owned = owners(self.module, optimizers)
            if self._private is not None and optimizers:
                self._private.check_stepped(owned)
            return owned

        owned = agreed(self.mesh, check)
        check_ties(self.surgery.specs, owned, optimizers, self.mesh)
        return owned

    def _build_reducer(self, owned: dict[str, tuple[int, int]]) -> Reducer:
        # Also on a stage without trainable parameters: it takes part in the norm's exchange.
        self.reducer = Reducer(
            list(self.module.named_parameters()),
            self.surgery.specs,
            self.mesh,
            config=self.config.zero,
            # Clipped gradients are summed: a mean over replicas would shrink them, not the noise.
            average=self._private is None,
            owner_of=owned,
            stage_of=self.surgery.stage_of,
        )
        self.reducer.by_calls = self._pipeline is not None
        pp, pipeline = self.mesh.pp_size, self.config.pipeline
        if pp > 1 and pipeline.microbatches(pp) > 1:
            self.reducer.rounding("every microbatch")
        return self.reducer

    def _detach(self) -> None:
        for shard in self.shards:
            shard.close()
        self.shards = []
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None

    def synchronize(self) -> None:
        """Wait for the weights of other ranks where the last step did not."""
        for shard in self.shards:
            shard.flush()

    def prepare_gradients(self) -> None:
        """Make sure that weights have values and gradients of the coming backward buckets.

        Raises:
            ConfigError: If weights were never loaded.
        """
        self.synchronize()
        self.check_filled()
        if self.reducer is None and self.surgery.trains and torch.is_grad_enabled():
            self._build_reducer({})
        if self.reducer is not None:
            self.reducer.sync = self.sync

    def before_forward(self) -> None:
        """Prepare a step: gradients into buckets, and rank 0's buffers for all replicas."""
        self.prepare_gradients()
        training = self.module.training
        # As ddp: before every forward that changes them, and before the first one after that.
        if self._buffers and (training or self._buffers_changed):
            with self.watch("buffers"):
                broadcast_buffers(self._buffers, self.mesh)
        self._buffers_changed = training

    def after_backward(self) -> None:
        """Finish the reduction that a plain backward has started."""
        if self.reducer is not None:
            self.reducer.finish_backward()

    def check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that no pipelined call has made, or that has been released.

        Raises:
            BatchError: If ``pp > 1`` and the loss has no node of ours in its graph.
            RuntimeError: If it was released before, or its forward ran with another `sync`.
        """
        if self._pipeline is not None:
            check_releases(loss, self.mesh.rank)

    @contextmanager
    def watch(self, what: str) -> Generator[None, None, None]:
        """Guard a block by the watchdog's deadline, and post its failure to the other ranks."""
        if self._watchdog is None:
            yield
            return
        with self._watchdog.guard(what):
            yield

    @contextmanager
    def counting(self, count: TokenCount | None) -> Generator[None, None, None]:
        """Let the loss function divide by ``count`` inside the block."""
        before, self._count = self._count, count
        try:
            yield
        finally:
            self._count = before

    def _wait_count(self) -> Tensor | None:
        return None if self._count is None else self._count.wait()

    def loss_scale(self) -> Tensor | None:
        """Return what the gradient of the loss is multiplied by, a scalar; ``None`` for 1."""
        return None if self.scaler is None else self.scaler.current(self.mesh.device)

    def run_pipeline(
        self, batches: list[Batch], *, listed: bool, grad: bool
    ) -> tuple[Tensor | None, Any]:
        """Run the schedule; return the loss and, where wanted, the logits."""
        if self._pipeline is None:
            raise ConfigError("This module is not cut into stages.")
        return self._pipeline(batches, listed=listed, grad=grad)

    def shards_of(self, optimizer: Optimizer) -> list[WatchedShards]:
        """Return the shards that an optimizer steps."""
        return [shard for shard in self.shards if shard.optimizer is optimizer]

    def order_of(self, optimizer: Optimizer) -> dict[str, int]:
        """Return the place of each parameter in one process: in the optimizer, else the module.

        An optimizer that was built after the module was cut knows its own stage's order only.
        """
        return self._orders.get(optimizer) or self._orders.get(None, {})

    def close(self) -> None:
        """Remove hooks and patches; the parameters keep their values. Collective over tp."""
        if self.closed:
            return
        self.closed = True
        self._detach()
        self._undo.close()
        if self._surgery is not None:
            self._surgery.close()
