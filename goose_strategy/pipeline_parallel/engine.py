"""Execute one stage's row of a schedule.

``torch.distributed.pipelining``'s runtime keeps receive buffers for all microbatches, fixes the
shapes at the first step, refuses fewer microbatches than stages under 1F1B and waits without a
deadline; it is the oracle of this engine's tests. This one decides nothing: the row is the order,
messages go through :mod:`goose_strategy.comm`, and every error says where in the schedule it arose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from goose_strategy.comm.p2p import Metas, metas_of
from goose_strategy.errors import BatchError, CallbackError, PeerError, ScheduleError
from goose_strategy.pipeline_parallel.hooks import PipelineHooks
from goose_strategy.pipeline_parallel.microbatch import precision_of, signature_of
from goose_strategy.pipeline_parallel.program import StageProgram, stage_program
from goose_strategy.pipeline_parallel.replay import Replay, Seen
from goose_strategy.pipeline_parallel.schedule import Action, Kind

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.config import PipelineConfig
    from goose_strategy.pipeline_parallel.hooks import Guard
    from goose_strategy.pipeline_parallel.links import Expected, Link, Sent, StageLinks
    from goose_strategy.pipeline_parallel.stage import PipelineStage


@dataclass
class StepResult:
    """What one call of a stage produced; all ``None`` except on the last stage.

    Attributes:
        loss: Sum of the microbatches' losses (of the sums that ``loss_fn`` returned), a detached
            scalar; ``None`` if the model returned none.
        count: Sum of the counts that ``loss_fn`` returned; ``None`` without ``loss_fn``.
        logits: Detached logits of each microbatch, if asked for.
    """

    loss: Tensor | None = None
    count: Tensor | None = None
    logits: list[Tensor] | None = None


class Engine:
    """Runs a stage on microbatches.

    Args:
        stage: The stage.
        links: Its links to the neighbours.
        config: Schedule and loss function.
        rank: Global rank, for messages.
        guard: Surrounds every action.
        hooks: Callbacks that are told of every action.
    """

    def __init__(
        self,
        stage: PipelineStage,
        links: StageLinks,
        config: PipelineConfig,
        *,
        rank: int | None = None,
        guard: Guard | None = None,
        hooks: PipelineHooks | None = None,
    ) -> None:
        self.stage = stage
        self.links = links
        self.config = config
        self.rank = rank
        self.guard = guard
        self.hooks = hooks or PipelineHooks()
        self.replay = Replay(stage.module) if config.recompute == "full" else None

    def run(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        *,
        train: bool,
        before_last_backward: Callable[[], None] | None = None,
        want_logits: bool = False,
        want_loss: bool = True,
    ) -> StepResult:
        """Run the whole schedule. Collective over the stages, which pass the same microbatches.

        Args:
            microbatches: Keyword arguments of the model, one mapping per microbatch.
            train: Run backwards too; gradients are added to every ``p.grad``.
            before_last_backward: Called before this stage's last backward: from then on, a
                parameter's gradient is complete once autograd has accumulated it.
            want_logits: Collect the logits on the last stage.
            want_loss: Call ``loss_fn`` (the model's own loss is taken whenever there is one).

        Returns:
            The result; on stages before the last it is empty.

        Raises:
            ScheduleError: If an action fails; names it, with the original error as the cause.
            PeerError: If a neighbour was lost.
        """
        if train and torch.is_inference_mode_enabled():
            raise ScheduleError("train=True cannot run inside torch.inference_mode().")
        stage = self.stage
        todo = stage_program(
            self.config.schedule,
            stage.num_stages,
            len(microbatches),
            train=train,
            stage=stage.index,
            recompute=train and self.replay is not None,
        )
        step = _Step(self, microbatches, todo, train=train)
        step.want_logits, step.want_loss = want_logits and stage.is_last, want_loss
        with torch.enable_grad() if train else torch.no_grad():
            if step.hooks.active:
                with self._guarded("start of the step"):
                    step.hooks.open()
            for action in todo.actions:
                if action is todo.last_backward and before_last_backward is not None:
                    before_last_backward()
                self._execute(action, step)
            self._finish(step)
        return step.result

    def _execute(self, action: Action, step: _Step) -> None:
        stage, microbatch = action.stage, action.microbatch
        try:
            with self._guarded(str(action), microbatch):
                step.hooks.launch(action)
                step.handlers[action.kind](action)
                step.hooks.finish(action)
        except (PeerError, CallbackError):
            raise
        except Exception as error:
            raise ScheduleError(
                f"{action} failed: {type(error).__name__}: {error}",
                rank=self.rank,
                stage=stage,
                microbatch=microbatch,
            ) from error

    def _finish(self, step: _Step) -> None:
        """Wait for what is still being sent: its tensors may not be freed before."""
        with self._guarded("end of the step"):
            for action, pending in step.sends.items():
                pending.wait()
                step.hooks.after(action)
            step.hooks.close()

    def _guarded(self, what: str, microbatch: int | None = None) -> AbstractContextManager[None]:
        if self.guard is None:
            return nullcontext()
        return self.guard(what, stage=self.stage.index, microbatch=microbatch)


class _Held(NamedTuple):
    """What a microbatch's backward needs.

    Attributes:
        received: The stage's inputs; leaves of its graph.
        edges: Where in the graph each differentiable output was made; ``None`` if no gradient
            flows. Edges, not tensors: the outputs are freed once they are sent.
        seed: On the last stage, the gradient to start with.
    """

    received: tuple[Tensor, ...]
    edges: list[GradientEdge | None]
    seed: tuple[Tensor, ...]


class _Kept(NamedTuple):
    """What a forward without a graph leaves to its recompute.

    Attributes:
        received: The stage's inputs.
        seen: The random state, and what else it found.
    """

    received: tuple[Tensor, ...]
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


class _Step:
    """One run of a row."""

    def __init__(
        self,
        engine: Engine,
        microbatches: Sequence[Mapping[str, Any]],
        todo: StageProgram,
        *,
        train: bool,
    ) -> None:
        self.stage = engine.stage
        self.links = engine.links
        self.loss_fn = engine.config.loss_fn
        self.microbatches = microbatches
        self.taken = todo.taken
        self.recomputed = todo.recomputed
        self.replay = engine.replay
        self.train = train
        self.hooks = engine.hooks.begin(engine, len(microbatches), train=train)
        self.want_logits = False
        self.want_loss = True
        self.result = StepResult()
        device_type, autocast = precision_of(microbatches)
        # Under autocast a backward would be cast anew; it follows its forward's types.
        self.plain: Callable[[], AbstractContextManager[object]] = (
            partial(torch.autocast, device_type, enabled=False) if autocast else nullcontext
        )
        self.keys = [(autocast, *signature_of(one)) for one in microbatches]
        # A forward without a graph leaves none of its casts in autocast's cache.
        self.uncached: Callable[[], AbstractContextManager[object]] = (
            partial(torch.autocast, device_type, cache_enabled=False) if autocast else nullcontext
        )
        self.held: dict[int, _Held] = {}
        self.kept: dict[int, _Kept] = {}
        self.metas: dict[int, Metas] = {}
        self.outbox: dict[int, Sequence[Tensor]] = {}
        self.inputs: dict[int, Expected] = {}
        self.gradients: dict[int, Expected] = {}
        self.sends: dict[Action, Sent] = {}
        self.handlers: Mapping[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.RECOMPUTE: self.recompute,
            Kind.SEND_FORWARD: self.send_forward,
            Kind.RECEIVE_FORWARD: self.receive_forward,
            Kind.SEND_BACKWARD: self.send_backward,
            Kind.RECEIVE_BACKWARD: self.receive_backward,
        }

    def receive_forward(self, action: Action) -> None:
        key = ("F", self.keys[action.microbatch])
        self.inputs[action.microbatch] = _need(self.links.from_previous).receive(key=key)

    def send_forward(self, action: Action) -> None:
        key, output = ("F", self.keys[action.microbatch]), self.outbox.pop(action.microbatch)
        self.sends[action] = _need(self.links.to_next).send(output, key=key)

    def receive_backward(self, action: Action) -> None:
        key, expected = ("B", self.keys[action.microbatch]), self.metas[action.microbatch]
        pending = _need(self.links.from_next).receive(key=key, expected=expected)
        self.gradients[action.microbatch] = pending

    def send_backward(self, action: Action) -> None:
        key, output = ("B", self.keys[action.microbatch]), self.outbox.pop(action.microbatch)
        self.sends[action] = _need(self.links.to_previous).send(output, key=key)

    def forward(self, action: Action) -> None:
        received = self._wait(self.inputs, action) if not self.stage.is_first else ()
        if self.train:
            for tensor in received:
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        if action.microbatch in self.recomputed:
            computed = self._forward_without_graph(action.microbatch, received)
        else:
            computed = self._compute(action.microbatch, received)
            if self.train:
                self._hold(action.microbatch, received, computed)
        if self.train:
            self.metas[action.microbatch] = metas_of(computed.roots)
        if self.stage.is_last:
            self._add_result(computed)
        else:
            self.outbox[action.microbatch] = computed.output

    def _forward_without_graph(self, index: int, received: tuple[Tensor, ...]) -> _Computed:
        inputs = (*received, *self.microbatches[index].values())
        with self.uncached(), torch.no_grad(), _need_replay(self.replay).first(inputs) as seen:
            computed = self._compute(index, received)
        self.kept[index] = _Kept(received, seen)
        return computed

    def recompute(self, action: Action) -> None:
        index = action.microbatch
        kept = self.kept.pop(index)
        with _need_replay(self.replay).again(kept.seen):
            computed = self._compute(index, kept.received)
        if metas_of(computed.roots) != self.metas[index]:
            raise ScheduleError(
                "the forward gave outputs of other shapes or types than the first time; a model "
                "that depends on more than its inputs, parameters, buffers and torch's random "
                "numbers needs recompute='none'."
            )
        self._hold(index, kept.received, computed)

    def _compute(self, index: int, received: tuple[Tensor, ...]) -> _Computed:
        microbatch = self.microbatches[index]
        output = self.stage.forward(microbatch, received)
        if not self.stage.is_last:
            return _Computed(output, [tensor for tensor in output if tensor.is_floating_point()])
        loss, count = self._loss(output, microbatch)
        return _Computed(output, [] if loss is None else [loss], count)

    def _hold(self, index: int, received: tuple[Tensor, ...], computed: _Computed) -> None:
        roots = computed.roots
        edges = [get_gradient_edge(root) if root.requires_grad else None for root in roots]
        seed = tuple(map(self.stage.seed, roots)) if self.stage.is_last else ()
        self.held[index] = _Held(received, edges, seed)

    def backward(self, action: Action) -> None:
        if action.microbatch in self.kept:
            raise ScheduleError("its recompute is missing in the schedule.")
        held = self.held.pop(action.microbatch)
        gradients = held.seed if self.stage.is_last else self._wait(self.gradients, action)
        pairs = [(e, g) for e, g in zip(held.edges, gradients, strict=True) if e is not None]
        if pairs:
            with self.plain():
                torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs])
        if not self.stage.is_first:
            self.outbox[action.microbatch] = [
                tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                for tensor in held.received
                if tensor.is_floating_point()
            ]

    def _wait(self, pending: dict[int, Expected], action: Action) -> tuple[Tensor, ...]:
        """Wait for an action's message, and free the sends that the neighbour took before it."""
        tensors = pending.pop(action.microbatch).wait()
        self.hooks.arrived(action)
        for send in self.taken.get(action, ()):
            self.sends.pop(send).wait()
            self.hooks.after(send)
        self.hooks.before(action)
        return tensors

    def _loss(
        self, output: Any, microbatch: Mapping[str, Any]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the last stage's loss, and the count of a ``loss_fn``."""
        loss: Tensor | None = None
        count: Tensor | None = None
        if self.loss_fn is None:
            loss = _read(output, "loss")
        elif self.want_loss:
            loss, counted = self.loss_fn(output, dict(microbatch))
            count = torch.as_tensor(counted).detach()
        if loss is None and self.train:
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


def _need_replay(replay: Replay | None) -> Replay:
    if replay is None:
        raise ScheduleError("the schedule has a recompute, but recompute='full' is not set.")
    return replay


def _need(link: Link | None) -> Link:
    if link is None:
        raise ScheduleError("the schedule has a message where the stage has no neighbour.")
    return link


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
