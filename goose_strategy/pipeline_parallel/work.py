"""What a rank computes in one run of its row: forwards, backwards, and what lies between them.

torch's ``PipelineStage`` splits a backward by walking the graph in Python, once per parameter
group, and computes checkpointed layers anew for each of them. Here ``I`` is one plain backward in
which the layers put their weight gradients off (:mod:`goose_strategy.grads.store`), and ``W``
computes these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from goose_strategy.comm.p2p import Metas, metas_of
from goose_strategy.errors import BatchError, ScheduleError
from goose_strategy.pipeline_parallel.microbatch import precision_of
from goose_strategy.pipeline_parallel.replay import Replay, Seen

if TYPE_CHECKING:
    from goose_strategy.grads.store import WeightGradStore, WeightGradWork
    from goose_strategy.pipeline_parallel.config import LossFunction
    from goose_strategy.pipeline_parallel.stage import PipelineStage

Place = tuple[int, int]
"""A stage and a microbatch."""
Tensors = tuple[Tensor, ...]


@dataclass
class StepResult:
    """What one call of a rank produced; all ``None`` except on the rank of the last stage.

    Attributes:
        loss: Sum of the microbatches' losses (of the sums that ``loss_fn`` returned), a detached
            scalar; ``None`` if the model returned none.
        count: Sum of the counts that ``loss_fn`` returned; ``None`` without ``loss_fn``.
        logits: Detached logits of each microbatch, if asked for.
    """

    loss: Tensor | None = None
    count: Tensor | None = None
    logits: list[Tensor] | None = None


class Clipping(Protocol):
    """What is done to weight gradients between ``I`` and ``W``.

    Attributes:
        across_stages: Whether the ``W`` of a microbatch needs the ``I`` of all stages.
        extra: Microbatches that may be held beyond those of the schedule.
    """

    @property
    def across_stages(self) -> bool: ...  # noqa: D102 - see the class

    @property
    def extra(self) -> int: ...  # noqa: D102

    def begin(self, microbatches: Sequence[Mapping[str, Any]]) -> None:
        """Note that a call with backwards begins."""

    def collect(self, place: Place, work: WeightGradWork) -> None:
        """Take what ``I`` has left of a stage and a microbatch."""

    def run(self, place: Place) -> None:
        """Compute and accumulate its weight gradients: ``W``."""

    def end(self) -> None:
        """Check that everything that was taken was also run."""


class Worker:
    """The stages of a rank, with what they need in every call.

    Args:
        stages: The rank's stages.
        loss_fn: Loss of the last stage's outputs, if not the model's own.
        replays: Whether forwards are run a second time.
        store: Keeps the weight gradients between ``I`` and ``W``; ``None`` without these actions.
        clipping: Takes them in between; ``None`` if they stay as they are.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        *,
        loss_fn: LossFunction | None,
        replays: bool,
        store: WeightGradStore | None,
        clipping: Clipping | None = None,
    ) -> None:
        self.clipping = clipping
        self.stages = {stage.index: stage for stage in stages}
        self.loss_fn = loss_fn
        self.store = store
        # Each stage writes into buffers of its own choice.
        self.replays = {s.index: Replay(s.module) for s in stages} if replays else {}


class _Held(NamedTuple):
    """What a microbatch's backward needs.

    Attributes:
        received: The stage's inputs; leaves of its graph.
        edges: Where in the graph each differentiable output was made; ``None`` if no gradient
            flows. Edges, not tensors: the outputs are freed once they are sent.
        seed: On the last stage, the gradient to start with.
    """

    received: Tensors
    edges: list[GradientEdge | None]
    seed: Tensors


class _Kept(NamedTuple):
    """What a forward without a graph leaves to its recompute.

    Attributes:
        received: The stage's inputs.
        seen: The random state, and what else it found.
    """

    received: Tensors
    seen: Seen


class _Computed(NamedTuple):
    """What a forward of the stage gave.

    Attributes:
        output: What the stage returned.
        roots: Where a backward starts: the loss on the last stage, else all float outputs.
        counted: What ``loss_fn`` counted.
    """

    output: Any
    roots: list[Tensor]
    counted: Tensor | None = None


class Work:
    """The computations of one call.

    Args:
        worker: The rank's stages.
        microbatches: Keyword arguments of the model.
        train: Whether backwards follow.
        recomputed: Whose forwards keep no graph.

    Attributes:
        metas: Shapes and types of the gradients that come back for a stage's outputs.
        result: What the last stage has summed so far.
        want_logits: Collect the logits on the last stage.
        want_loss: Call ``loss_fn``.
    """

    def __init__(
        self,
        worker: Worker,
        microbatches: Sequence[Mapping[str, Any]],
        *,
        train: bool,
        recomputed: frozenset[Place] = frozenset(),
    ) -> None:
        self._worker = worker
        self._microbatches = microbatches
        self._train = train
        self._recomputed = recomputed
        self.want_logits = False
        self.want_loss = True
        self.result = StepResult()
        self.metas: dict[Place, Metas] = {}
        device_type, autocast = precision_of(microbatches)
        self.autocast = autocast
        # Under autocast a backward would be cast anew; it follows its forward's types.
        self._plain: Callable[[], AbstractContextManager[object]] = (
            partial(torch.autocast, device_type, enabled=False) if autocast else nullcontext
        )
        # A forward without a graph leaves none of its casts in autocast's cache.
        self._uncached: Callable[[], AbstractContextManager[object]] = (
            partial(torch.autocast, device_type, cache_enabled=False) if autocast else nullcontext
        )
        self._held: dict[Place, _Held] = {}
        self._kept: dict[Place, _Kept] = {}
        self._put_off: dict[Place, WeightGradWork] = {}

    def forward(self, place: Place, received: Tensors) -> Tensors:
        """Run a stage on a microbatch.

        Args:
            place: Both.
            received: The stage's inputs, which may become leaves of its graph.

        Returns:
            What the next stage receives; nothing from the last one.
        """
        stage = self._worker.stages[place[0]]
        if self._train:
            for tensor in received:
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        if place in self._recomputed:
            computed = self._without_graph(place, received)
        else:
            computed = self._compute(place, received)
            if self._train:
                self._hold(place, received, computed)
        if self._train:
            self.metas[place] = metas_of(computed.roots)
        if not stage.is_last:
            return tuple(computed.output)
        self._add_result(computed)
        return ()

    def _without_graph(self, place: Place, received: Tensors) -> _Computed:
        inputs = (*received, *self._microbatches[place[1]].values())
        with self._uncached(), torch.no_grad(), self._replay(place).first(inputs) as seen:
            computed = self._compute(place, received)
        self._kept[place] = _Kept(received, seen)
        return computed

    def recompute(self, place: Place) -> None:
        """Run a forward again, to have its graph.

        Raises:
            ScheduleError: If it comes out different.
        """
        kept = self._kept.pop(place)
        with self._replay(place).again(kept.seen):
            computed = self._compute(place, kept.received)
        if metas_of(computed.roots) != self.metas[place]:
            raise ScheduleError(
                "the forward gave outputs of other shapes or types than the first time; a model "
                "that depends on more than its inputs, parameters, buffers and torch's random "
                "numbers needs recompute='none'."
            )
        self._hold(place, kept.received, computed)

    def backward(self, place: Place, gradients: Tensors | None) -> list[Tensor]:
        """Run the backward of a microbatch, weights included.

        Args:
            place: Stage and microbatch.
            gradients: Those of the stage's outputs; ``None`` on the last stage.

        Returns:
            The gradients of the stage's float inputs; none on the first stage.

        Raises:
            ScheduleError: If the forward has left no graph.
        """
        if place in self._kept:
            raise ScheduleError("its recompute is missing in the schedule.")
        held = self._held.pop(place)
        found = held.seed if gradients is None else gradients
        pairs = [(e, g) for e, g in zip(held.edges, found, strict=True) if e is not None]
        if pairs:
            with self._plain():
                torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs])
        return [
            tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            for tensor in held.received
            if tensor.is_floating_point()
        ]

    def backward_input(self, place: Place, gradients: Tensors | None) -> list[Tensor]:
        """Run the backward of a microbatch without most weights, as :meth:`backward`."""
        store = self._store()
        with store.collecting():
            out = self.backward(place, gradients)
        if self._worker.clipping is not None:
            with self._plain():
                self._worker.clipping.collect(place, store.take())
        else:
            self._put_off[place] = store.take()
        return out

    def backward_weight(self, place: Place) -> None:
        """Compute the weight gradients that :meth:`backward_input` has put off."""
        with self._plain():
            if self._worker.clipping is not None:
                self._worker.clipping.run(place)
            else:
                self._put_off.pop(place).run()

    def _compute(self, place: Place, received: Tensors) -> _Computed:
        stage, microbatch = self._worker.stages[place[0]], self._microbatches[place[1]]
        output = stage.forward(microbatch, received)
        if not stage.is_last:
            return _Computed(output, [tensor for tensor in output if tensor.is_floating_point()])
        loss, count = self._loss(output, microbatch)
        return _Computed(output, [] if loss is None else [loss], count)

    def _hold(self, place: Place, received: Tensors, computed: _Computed) -> None:
        roots = computed.roots
        edges = [get_gradient_edge(root) if root.requires_grad else None for root in roots]
        stage = self._worker.stages[place[0]]
        seed = tuple(_seed(root, stage.loss_scale) for root in roots) if stage.is_last else ()
        self._held[place] = _Held(received, edges, seed)

    def _loss(
        self, output: Any, microbatch: Mapping[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the last stage's loss, and the count of a ``loss_fn``."""
        loss: Tensor | None = None
        count: Tensor | None = None
        loss_fn = self._worker.loss_fn
        if loss_fn is None:
            loss = _read(output, "loss")
        elif self.want_loss:
            loss, count = _sum_and_count(loss_fn(output, dict(microbatch)))
        if loss is None and self._train:
            raise BatchError("the model returned no loss; pass labels, or a loss_fn.")
        return loss, count

    def _add_result(self, computed: _Computed) -> None:
        """Add the last stage's loss, count and logits to the result."""
        result = self.result
        if self.want_logits:
            result.logits = [*(result.logits or []), _read(computed.output, "logits").detach()]
        if (count := computed.counted) is not None:
            result.count = count if result.count is None else result.count + count
        for loss in computed.roots:
            value = loss.detach()
            result.loss = value.clone() if result.loss is None else result.loss + value

    def _replay(self, place: Place) -> Replay:
        replay = self._worker.replays.get(place[0])
        if replay is None:
            raise ScheduleError("the schedule has a recompute, but recompute='full' is not set.")
        return replay

    def _store(self) -> WeightGradStore:
        if self._worker.store is None:
            raise ScheduleError(
                "the schedule splits the backward, but the engine has no store for the weights."
            )
        return self._worker.store


def _seed(loss: Tensor, scale: Tensor | None) -> Tensor:
    """Return the gradient that a backward begins with."""
    return torch.ones_like(loss) if scale is None else scale.to(loss).expand_as(loss)


def _read(output: Any, name: str) -> Any:
    """Return a field of a model's output."""
    if isinstance(output, Mapping):
        return output.get(name)
    if not hasattr(output, name):
        raise ScheduleError(
            f"the model returned a {type(output).__name__} without {name!r}; return an object or a "
            "dict with loss and logits, or pass loss_fn in PipelineConfig."
        )
    return getattr(output, name)


def _sum_and_count(returned: Any) -> tuple[Tensor, Tensor]:
    """Take what a ``loss_fn`` returned apart."""
    pair = returned if isinstance(returned, tuple | list) and len(returned) == 2 else (None, None)
    loss, counted = pair
    if not isinstance(loss, Tensor) or loss.numel() != 1 or counted is None:
        shape = f" of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else ""
        raise BatchError(
            f"loss_fn returned {type(returned).__name__}{shape}; it must return (sum of the losses,"
            " number of summed items), the first a tensor with one element: the mean is taken over"
            " all microbatches and replicas."
        )
    return loss, torch.as_tensor(counted).detach()
