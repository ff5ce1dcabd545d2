"""What the calls of a sharded module may know of it.

The module owns its forwards and its pipelined calls, and these act on the module. Naming here what
they use keeps the files one-way: calls know this page, the module knows the calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from goose_strategy.data_parallel.reducer import Reducer
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.pipeline_parallel.hooks import PipelineHooks
    from goose_strategy.runtime.batch import Batch, BatchGuard
    from goose_strategy.runtime.counting import TokenCount
    from goose_strategy.runtime.dropout import DropoutStream
    from goose_strategy.runtime.settings import RuntimeConfig
    from goose_strategy.runtime.surgery import Surgery


class Handle(Protocol):
    """A sharded module, as its calls see it; `goose_strategy.runtime.model.ShardedModel` is one.

    Attributes:
        mesh: The mesh.
        config: Settings of the runtime.
        reducer: Buckets of the gradients, once there are any.
        sync: Whether the next backward reduces gradients over dp.
        global_loss: Whether a causal LM's loss is summed over the replicas.
        guard: Compares batches over the ranks of one replica.
        module: The user's module.
        hooks: Callbacks that are told of every action of a pipeline.
    """

    mesh: ParallelMesh
    config: RuntimeConfig
    reducer: Reducer | None
    sync: bool
    global_loss: bool
    guard: BatchGuard
    module: nn.Module
    hooks: PipelineHooks

    @property
    def surgery(self) -> Surgery:
        """What was done to the module."""

    @property
    def dropout(self) -> DropoutStream:
        """The random numbers of the module's calls."""

    def prepare_gradients(self) -> None:
        """Make sure that gradients of the coming backward land in buckets."""

    def loss_scale(self) -> Tensor | None:
        """Return what the gradient of the loss is multiplied by, a scalar; ``None`` for 1."""

    def watch(self, what: str) -> AbstractContextManager[None]:
        """Guard a block by the watchdog's deadline."""

    def counting(self, count: TokenCount | None) -> AbstractContextManager[None]:
        """Let the loss function divide by ``count`` inside the block."""

    def run_pipeline(
        self, batches: list[Batch], *, listed: bool, grad: bool
    ) -> tuple[Tensor | None, Any]:
        """Run the schedule; return the loss and, where wanted, the logits."""
