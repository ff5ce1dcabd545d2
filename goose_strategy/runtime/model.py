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

from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.data_parallel.reducer import Reducer
from goose_strategy.errors import BatchError, ConfigError
from goose_strategy.optim.zero import ZeroShards
from goose_strategy.pipeline_parallel.bridge import reaches_bridge
from goose_strategy.runtime.batch import Batch, BatchGuard
from goose_strategy.runtime.forward import DirectForward, PipelinedForward
from goose_strategy.runtime.naming import (
    owners,
    record_groups,
    refill_groups,
    strip_placeholders,
)
from goose_strategy.runtime.pipeline import PipelineCall
from goose_strategy.runtime.replicate import (
    broadcast_buffers,
    equalize,
    share_random_state,
)
from goose_strategy.runtime.surgery import Surgery, operate

if TYPE_CHECKING:
    from goose_strategy.comm.watchdog import Watchdog
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.runtime.counting import TokenCount
    from goose_strategy.runtime.settings import RuntimeConfig


class ShardedModel:
    """A module sharded in place, and everything that trains it.

    Args:
        module: The user's module.
        mesh: The mesh.
        config: Settings of the runtime.
        watchdog: Watches over blocks that may hang, or ``None``.

    Attributes:
        module: The user's module; its class and names stay.
        optimizers: Optimizers attached to it.
        sync: Whether the next backward reduces gradients over dp.
        global_loss: Whether a causal LM's loss is summed over the replicas.
        guard: Compares batches over the ranks of one replica.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: ParallelMesh,
        config: RuntimeConfig,
        watchdog: Watchdog | None,
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.config = config
        self.optimizers: list[Optimizer] = []
        self.shards: list[ZeroShards] = []
        self.reducer: Reducer | None = None
        self.sync = True
        self.global_loss = True
        self.guard = BatchGuard(mesh)
        self._watchdog = watchdog
        self._surgery: Surgery | None = None
        self._pipeline: PipelineCall | None = None
        self._count: TokenCount | None = None
        self._undo = ExitStack()

    @property
    def surgery(self) -> Surgery:
        """What was done to the module."""
        if self._surgery is None:
            raise ConfigError("The module is not sharded yet.")
        return self._surgery

    def shard(self, optimizers: Sequence[Optimizer] = ()) -> None:
        """Shard the module in place, patch its forward, attach the optimizers. Collective."""
        recorded = record_groups(self.module, optimizers)
        equalize(self.module, self.mesh)
        share_random_state(self.mesh)
        self._surgery = operate(self.module, self.mesh, self.config, count=self._wait_count)
        self.module.to(self.mesh.device)
        self._install()
        if optimizers:
            refill_groups(self.module, optimizers, recorded, self.surgery.tied)
            self.attach(optimizers)

    def _install(self) -> None:
        surgery = self.surgery
        for _, lm in surgery.models:
            if surgery.stage is not None:
                self._pipeline = PipelineCall(self, surgery.stage, self._watchdog)
                self._patch(lm, PipelinedForward(self, lm.forward))
            else:
                self._patch(lm, DirectForward(self, lm.forward))
        if all(lm is not self.module for _, lm in surgery.models):
            handle = self.module.register_forward_pre_hook(lambda *_: self.before_forward())
            self._undo.callback(handle.remove)

    def _patch(self, model: nn.Module, forward: Any) -> None:
        # On the instance, so that the class, isinstance checks and config survive.
        model.forward = forward
        self._undo.callback(vars(model).pop, "forward", None)

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Attach all optimizers of the module, in place of those attached before. Collective."""
        strip_placeholders(optimizers)
        self._detach()
        self.optimizers = list(optimizers)
        owned = owners(self.module, self.optimizers)
        self._check_ties(owned)
        self._build_reducer(owned)
        if self.reducer is not None:
            self.shards = [ZeroShards(self.reducer, o) for o in self.optimizers]

    def _check_ties(self, owned: dict[str, tuple[int, int]]) -> None:
        """Both copies of a tied weight must be stepped alike, or they drift apart.

        Raises:
            ConfigError: If their groups have different options.
        """
        ties = {n: s.tie for n, s in self.surgery.specs.items() if s.tie is not None}
        if self.mesh.tie is None:
            return
        mine = {}
        for name, canonical in ties.items():
            if name in owned:
                optimizer, group = owned[name]
                options = self.optimizers[optimizer].param_groups[group]
                mine[canonical] = {
                    k: str(v) for k, v in sorted(options.items()) if k not in ("params", "name")
                }
        both = all_gather_objects(mine, self.mesh.tie)
        if both[0] != both[-1]:
            raise ConfigError(
                f"The copies of the tied weight {sorted(ties.values())} on the first and the last "
                f"stage are in groups with different options ({both[0]} and {both[-1]}); put the "
                "embedding and the output head into one group."
            )

    def _build_reducer(self, owned: dict[str, tuple[int, int]]) -> None:
        # Also on a stage without trainable parameters: it takes part in the norm's exchange.
        self.reducer = Reducer(
            list(self.module.named_parameters()),
            self.surgery.specs,
            self.mesh,
            config=self.config.zero,
            average=True,
            owner_of=owned,
        )

    def _detach(self) -> None:
        for shard in self.shards:
            shard.close()
        self.shards = []
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None

    def before_forward(self) -> None:
        """Make sure that gradients of the coming backward land in buckets; sync buffers."""
        if self.reducer is None and self.surgery.trains and torch.is_grad_enabled():
            self._build_reducer({})
        if self.reducer is not None:
            self.reducer.sync = self.sync
        if not self.surgery.models and self.module.training:
            broadcast_buffers(self.module, self.mesh)

    def after_backward(self) -> None:
        """Finish the reduction that a plain backward has started."""
        if self.reducer is not None:
            self.reducer.finish_backward()

    def check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that no pipelined call has made.

        Raises:
            BatchError: If ``pp > 1`` and the loss has no node of ours in its graph.
        """
        if self._pipeline is None or reaches_bridge(loss):
            return
        raise BatchError(
            "backward() was called on a tensor that does not come from a pipelined call. With "
            "pp > 1 the loss must be the model's own (pass labels=...), or be computed on the last "
            "stage: PipelineConfig(loss_fn=my_loss) with my_loss(outputs, microbatch) -> "
            "(sum, count).",
            rank=self.mesh.rank,
        )

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

    def run_pipeline(self, batches: list[Batch], *, grad: bool) -> tuple[Tensor | None, Any]:
        """Run the schedule; return the loss and, where wanted, the logits."""
        if self._pipeline is None:
            raise ConfigError("This module is not cut into stages.")
        return self._pipeline(batches, grad=grad)

    def shards_of(self, optimizer: Optimizer) -> list[ZeroShards]:
        """Return the shards that an optimizer steps."""
        return [shard for shard in self.shards if shard.optimizer is optimizer]

    def close(self) -> None:
        """Remove hooks and patches; the parameters keep their values."""
        self._detach()
        self._undo.close()
        if self._surgery is not None:
            self._surgery.close()
