"""One pipelined call: split the batch, run the schedule, share the loss, keep the gradients.

Between the schedule and the user's ``loss.backward()`` lies the user's own code: gradient clearing
by the Trainer, a division for accumulation, a second loss. The call's gradients therefore stay its
own until its loss's backward arrives with a factor, and are released times that factor
(:mod:`goose_strategy.data_parallel.call`).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from goose_strategy.comm.collectives import all_gather_objects, all_reduce, broadcast
from goose_strategy.errors import BatchError, ScheduleError
from goose_strategy.pipeline_parallel.bridge import attach_loss
from goose_strategy.pipeline_parallel.engine import Engine
from goose_strategy.pipeline_parallel.links import connect_stages
from goose_strategy.pipeline_parallel.microbatch import split_batch
from goose_strategy.privacy.clipping import MASK
from goose_strategy.runtime.batch import join_logits
from goose_strategy.runtime.counting import TokenCount
from goose_strategy.runtime.private import private_pipeline

if TYPE_CHECKING:
    from goose_strategy.comm.watchdog import Watchdog
    from goose_strategy.data_parallel.call import CallGrads
    from goose_strategy.data_parallel.reducer import Reducer
    from goose_strategy.pipeline_parallel.config import PipelineConfig
    from goose_strategy.pipeline_parallel.stage import ModelPart
    from goose_strategy.pipeline_parallel.work import StepResult
    from goose_strategy.runtime.batch import Batch
    from goose_strategy.runtime.handle import Handle
    from goose_strategy.runtime.private import PrivateTraining

_RELEASE = "goose_release"


class PipelineCall:
    """Runs calls of a model that is cut into stages.

    Args:
        model: The sharded model.
        part: This rank's stages of it.
        config: The settings with the schedule that was chosen.
        watchdog: Guards every action, or ``None``.
        private: What private training adds, or ``None``.
    """

    def __init__(
        self,
        model: Handle,
        part: ModelPart,
        config: PipelineConfig,
        watchdog: Watchdog | None,
        private: PrivateTraining | None = None,
    ) -> None:
        self._model = model
        self._mesh = model.mesh
        self._private = private
        self._scale: Tensor | None = None
        self._config = config if private is None else private_pipeline(config)
        self.engine = Engine(
            part,
            connect_stages(model.mesh, part.chunks),
            self._config,
            rank=model.mesh.rank,
            guard=None if watchdog is None else watchdog.guard,
            hooks=model.hooks,
            clipping=None if private is None else private.clipping,
        )

    def __call__(
        self, batches: list[Batch], *, listed: bool, grad: bool
    ) -> tuple[Tensor | None, Any]:
        """Run the schedule over the batches of one call. Collective over the world.

        Args:
            batches: One batch to be split, or microbatches.
            listed: Whether they are microbatches already.
            grad: Whether the caller wants gradients (if there are labels and trainable weights).

        Returns:
            The loss, a scalar equal on all ranks that releases the gradients in its backward, or
            ``None`` without labels; and the logits where they are wanted, else ``None``.
        """
        model, own_loss = self._model, self._config.loss_fn is not None
        has_loss = own_loss or all(batch.get("labels") is not None for batch in batches)
        train = grad and has_loss and model.surgery.trains
        want_logits = self._config.return_logits or not has_loss
        private = self._private if train else None
        microbatches = self._cut(batches, private, listed=listed)
        group = self._mesh.dp if model.global_loss else None
        count = None
        counts = has_loss and not own_loss and private is None
        if counts and "num_items_in_batch" not in batches[0]:
            count = TokenCount.of(batches, group)
        with ExitStack() as stack:
            stack.enter_context(model.counting(count))
            if private is not None:
                stack.enter_context(model.surgery.by_sample.inside())
            if (head := model.surgery.head) is not None:
                stack.enter_context(head.local(not (own_loss or want_logits)))
            result, call = self._run(microbatches, train=train, want_logits=want_logits)
        if count is not None:
            # Only the last stage has divided by it; elsewhere the sum would stay under way.
            count.wait()
        loss: Tensor | None = None
        scale: float | Tensor = 1.0
        if private is not None:
            loss = self._mean_over_samples(result, private)
        elif has_loss:
            loss, scale = self._share(result, own_loss=own_loss)
        if self._scale is not None:
            # The call's gradients were scaled from the loss on, or fp16 would have lost the small
            # ones; what the user's backward brings is scaled, too.
            scale = scale / self._scale
        logits = self._share_logits(result.logits) if want_logits else None
        if loss is not None and call is not None:
            release = Release(model, call, scale, private)
            loss = attach_loss(loss, release)
            # So that a loss tells before its backward whether that may come (`releases_of`).
            setattr(loss.grad_fn, _RELEASE, release)
        return loss, logits

    def _cut(
        self, batches: list[Batch], private: PrivateTraining | None, *, listed: bool
    ) -> list[Batch]:
        """Return the microbatches of a call."""
        if private is not None:
            return private.prepare(batches, self._config, listed=listed)
        if self._private is not None:
            # An evaluation: marks of a draw mean nothing to the model.
            batches = [{k: v for k, v in batch.items() if k != MASK} for batch in batches]
        whole = batches if listed else batches[0]
        return split_batch(whole, self._config, stages=self._mesh.pp_size)

    def _run(
        self, microbatches: list[Batch], *, train: bool, want_logits: bool
    ) -> tuple[StepResult, CallGrads | None]:
        reducer = self._model.reducer
        self._scale_by(None)
        if not train or reducer is None:
            return self.engine.run(microbatches, train=False, want_logits=want_logits), None
        self._scale_by(self._model.loss_scale())
        call = reducer.begin_call(self._model.sync)
        result = self.engine.run(
            microbatches,
            train=True,
            completing=reducer.completing,
            want_logits=want_logits,
        )
        with self._model.watch("gradient reduction"):
            reducer.end_call(call)
        return result, call

    def _scale_by(self, scale: Tensor | None) -> None:
        """Multiply the gradients of this call by a scale, from the loss on."""
        self._scale = scale
        for stage in self.engine.part.stages:
            stage.loss_scale = scale

    def _share(self, result: StepResult, *, own_loss: bool) -> tuple[Tensor, float | Tensor]:
        """Return the global loss on all ranks, and the factor that its gradients still lack."""
        mesh, model = self._mesh, self._model
        dtype = model.surgery.loss_dtype
        pair = torch.zeros(2, dtype=dtype, device=mesh.device)
        if result.loss is not None and mesh.tp_rank == 0:
            pair[0] = result.loss
            pair[1] = 1 if result.count is None else result.count
        with model.watch("the sum of the loss"):
            all_reduce(pair, mesh.world if model.global_loss else mesh.model)
        # The reducer averages over dp, but the sum over tokens is divided by all of them already.
        if not own_loss:
            return pair[0].clone(), float(mesh.dp_size)
        count = pair[1].clamp(min=1)
        return pair[0] / count, mesh.dp_size / count

    def _mean_over_samples(self, result: StepResult, private: PrivateTraining) -> Tensor:
        """Return the mean loss of the samples of all replicas, for people to look at."""
        mesh = self._mesh
        pair = torch.zeros(2, dtype=self._model.surgery.loss_dtype, device=mesh.device)
        if result.loss is not None and mesh.tp_rank == 0:
            pair[0], pair[1] = result.loss, private.samples()
        private.end_call()
        with self._model.watch("the sum of the loss"):
            all_reduce(pair, mesh.world)
        return pair[0] / pair[1].clamp(min=1)

    def _share_logits(self, logits: list[Tensor] | None) -> Any:
        """Send the last stage's logits to all stages.

        Returns:
            ``[rows, seq, vocab]``; a tuple of one tensor per microbatch where their lengths differ.
        """
        mesh = self._mesh
        metas = None if logits is None else [(tuple(t.shape), t.dtype) for t in logits]
        every = all_gather_objects(metas, mesh.model_control)
        known = next((meta for meta in every if meta is not None), None)
        if known is None:
            raise ScheduleError("The last stage returned no logits.", rank=mesh.rank)
        chunks = self.engine.part.chunks
        source = mesh.layout.stage_rank(mesh.rank, chunks.rank_of(chunks.stages - 1))
        received = []
        for index, (shape, dtype) in enumerate(known):
            if logits is not None:
                tensor = logits[index].contiguous()
            else:
                tensor = torch.empty(shape, dtype=dtype, device=mesh.device)
            broadcast(tensor, source=source, group=mesh.pp_forward)
            received.append(tensor)
        return join_logits(received)


class Release:
    """What the backward of a pipelined call's loss does: release the call's gradients, once.

    Args:
        model: The sharded model.
        call: Owner of the gradients.
        scale: What the gradients still lack.
        private: What must know of the release, if it is one of clipped gradients.
    """

    def __init__(
        self,
        model: Handle,
        call: CallGrads,
        scale: float | Tensor,
        private: PrivateTraining | None = None,
    ) -> None:
        self._model = model
        self._private = private
        self._call: CallGrads | None = call
        self._scale = scale

    def __call__(self, factor: Tensor) -> None:
        """Add the gradients times ``factor`` to ``p.grad``."""
        reducer, call = self.check()
        if self._private is not None:
            self._private.ledger.check_factor(factor)
        self._call = None
        reducer.release(call, factor * self._scale)
        if self._private is not None:
            self._private.released(reducer.buckets)

    def check(self) -> tuple[Reducer, CallGrads]:
        """Check that a backward may come now.

        Returns:
            What releases the gradients, and their owner.

        Raises:
            RuntimeError: If it came before, the module was closed, or the forward ran with another
                setting of ``no_backward_sync``.
        """
        call, model = self._call, self._model
        if call is None:
            raise RuntimeError(
                "backward was called a second time on the loss of one pipelined call; its "
                "gradients were released by the first. Call the model again, or add the losses "
                "up before one backward."
            )
        if model.reducer is None:
            raise RuntimeError("The module was closed before backward() of its loss.")
        if call.sync != model.sync:
            raise RuntimeError(
                f"The forward ran {'with' if call.sync else 'without'} gradient sync and its "
                f"backward {'with' if model.sync else 'without'}; put both into the same "
                "no_backward_sync block."
            )
        return model.reducer, call


def releases_of(loss: Tensor) -> list[Release]:
    """Return what a backward from ``loss`` would release, found by walking its graph."""
    found: list[Release] = []
    todo: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        release = getattr(node, _RELEASE, None)
        if isinstance(release, Release):
            found.append(release)
        todo.extend(following for following, _ in node.next_functions)
    return found


def check_releases(loss: Tensor, rank: int) -> None:
    """Check that a loss comes from pipelined calls whose gradients may be released now.

    Raises:
        BatchError: If it comes from none, or nothing is trained.
        RuntimeError: If one was released before, or its forward ran with another `sync`.
    """
    if found := releases_of(loss):
        for release in found:
            release.check()
        return
    if not loss.requires_grad:
        raise BatchError(
            "backward() was called on a loss without a graph: no parameter of the model has "
            "requires_grad=True, or it was called under torch.no_grad().",
            rank=rank,
        )
    raise BatchError(
        "backward() was called on a tensor that does not come from a pipelined call. With "
        "pp > 1 the loss must be the model's own (pass labels=...), or be computed on the last "
        "stage: PipelineConfig(loss_fn=my_loss) with my_loss(outputs, microbatch) -> "
        "(sum, count).",
        rank=rank,
    )
