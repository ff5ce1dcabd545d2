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
from goose_strategy.pipeline_parallel.program import stage_program
from goose_strategy.pipeline_parallel.schedule import Action, Kind
from goose_strategy.pipeline_parallel.stage import LABELS, PipelineStage

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.config import PipelineConfig
    from goose_strategy.pipeline_parallel.hooks import Guard
    from goose_strategy.pipeline_parallel.links import Expected, Link, Sent, StageLinks


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
        )
        step = _Step(self, microbatches, todo.taken, train=train)
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
        metas: Shapes and types of the gradients to come.
        seed: On the last stage, the gradient to start with.
    """

    received: tuple[Tensor, ...]
    edges: list[GradientEdge | None]
    metas: Metas
    seed: tuple[Tensor, ...]


class _Step:
    """One run of a row."""

    def __init__(
        self,
        engine: Engine,
        microbatches: Sequence[Mapping[str, Any]],
        taken: Mapping[Action, tuple[Action, ...]],
        *,
        train: bool,
    ) -> None:
        self.stage = engine.stage
        self.links = engine.links
        self.loss_fn = engine.config.loss_fn
        self.microbatches = microbatches
        self.taken = taken
        self.train = train
        self.hooks = engine.hooks.begin(engine, len(microbatches), train=train)
        self.want_logits = False
        self.want_loss = True
        self.result = StepResult()
        device_type, autocast = _precision(microbatches)
        # Under autocast a backward would be cast anew; it follows its forward's types.
        self.plain: Callable[[], AbstractContextManager[object]] = (
            partial(torch.autocast, device_type, enabled=False) if autocast else nullcontext
        )
        self.keys = [(autocast, *_signature(one)) for one in microbatches]
        self.held: dict[int, _Held] = {}
        self.outbox: dict[int, Sequence[Tensor]] = {}
        self.inputs: dict[int, Expected] = {}
        self.gradients: dict[int, Expected] = {}
        self.sends: dict[Action, Sent] = {}
        self.handlers: Mapping[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
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
        key, expected = ("B", self.keys[action.microbatch]), self.held[action.microbatch].metas
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
        microbatch = self.microbatches[action.microbatch]
        output = self.stage.forward(microbatch, received)
        seed: tuple[Tensor, ...] = ()
        if self.stage.is_last:
            loss = self._take_result(output, microbatch)
            roots = [] if loss is None else [loss]
            seed = tuple(torch.ones_like(root) for root in roots)
        else:
            self.outbox[action.microbatch] = output
            roots = [tensor for tensor in output if tensor.is_floating_point()]
        if self.train:
            edges = [get_gradient_edge(root) if root.requires_grad else None for root in roots]
            self.held[action.microbatch] = _Held(received, edges, metas_of(roots), seed)

    def backward(self, action: Action) -> None:
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

    def _take_result(self, output: Any, microbatch: Mapping[str, Any]) -> Tensor | None:
        """Add the last stage's loss and logits to the result; return the loss."""
        result = self.result
        if self.want_logits:
            result.logits = [*(result.logits or []), _read(output, "logits").detach()]
        loss: Tensor | None = None
        if self.loss_fn is None:
            loss = _read(output, "loss")
        elif self.want_loss:
            loss, count = self.loss_fn(output, dict(microbatch))
            count = torch.as_tensor(count).detach()
            result.count = count if result.count is None else result.count + count
        if loss is not None:
            value = loss.detach()
            result.loss = value.clone() if result.loss is None else result.loss + value
        elif self.train:
            raise BatchError("the model returned no loss; pass labels, or a loss_fn.")
        return loss


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


def _signature(microbatch: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return what fixes the shapes of the messages of a microbatch, equal on all stages."""
    return tuple(
        (name, tuple(value.shape))
        for name, value in sorted(microbatch.items())
        if isinstance(value, Tensor) and name not in LABELS
    )


def _precision(microbatches: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the type of the device, and the type to which autocast casts on it."""
    tensors = (v for one in microbatches for v in one.values() if isinstance(v, Tensor))
    device_type = next((tensor.device.type for tensor in tensors), "cpu")
    if not torch.is_autocast_enabled(device_type):
        return device_type, ""
    return device_type, str(torch.get_autocast_dtype(device_type))
