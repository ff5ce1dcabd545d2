"""Execute one rank's row of a schedule.

``torch.distributed.pipelining``'s runtime keeps receive buffers for all microbatches, fixes the
shapes at the first step, refuses fewer microbatches than stages under 1F1B and waits without a
deadline; it is the oracle of this engine's tests. This one decides nothing: the row is the order,
messages go through :mod:`goose_strategy.comm`, and every error says where in the schedule it arose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from goose_strategy.errors import CallbackError, PeerError, ScheduleError
from goose_strategy.pipeline_parallel.hooks import PipelineHooks
from goose_strategy.pipeline_parallel.microbatch import signature_of
from goose_strategy.pipeline_parallel.program import RankProgram, rank_program
from goose_strategy.pipeline_parallel.schedule import Action, Kind
from goose_strategy.pipeline_parallel.work import StepResult, Work, Worker

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.config import PipelineConfig
    from goose_strategy.pipeline_parallel.hooks import Guard
    from goose_strategy.pipeline_parallel.links import Expected, Sent, StageLinks
    from goose_strategy.pipeline_parallel.stage import ModelPart
    from goose_strategy.pipeline_parallel.work import Place, Tensors

Completing: TypeAlias = Callable[[int], AbstractContextManager[None]]
"""``completing(stage)`` surrounds the last action that adds to some of a stage's gradients."""


class Engine:
    """Runs a rank's stages on microbatches.

    Args:
        part: The rank's stages.
        links: Its links to other ranks.
        config: Schedule and loss function.
        rank: Global rank, for messages.
        guard: Surrounds every action.
        hooks: Callbacks that are told of every action.
    """

    def __init__(
        self,
        part: ModelPart,
        links: StageLinks,
        config: PipelineConfig,
        *,
        rank: int | None = None,
        guard: Guard | None = None,
        hooks: PipelineHooks | None = None,
    ) -> None:
        self.part = part
        self.links = links
        self.config = config
        self.rank = rank
        self.guard = guard
        self.hooks = hooks or PipelineHooks()
        self.worker = Worker(
            part.stages,
            loss_fn=config.loss_fn,
            replays=config.recompute == "full",
            store=part.store,
        )

    def run(
        self,
        microbatches: Sequence[Mapping[str, Any]],
        *,
        train: bool,
        completing: Completing | None = None,
        want_logits: bool = False,
        want_loss: bool = True,
    ) -> StepResult:
        """Run the whole schedule. Collective over the ranks, which pass the same microbatches.

        Args:
            microbatches: Keyword arguments of the model, one mapping per microbatch.
            train: Run backwards too; gradients are added to every ``p.grad``.
            completing: Surrounds the actions after which gradients of a stage are complete: what
                autograd accumulates inside is a parameter's last contribution, unless several
                stages of the rank use it.
            want_logits: Collect the logits on the last stage.
            want_loss: Call ``loss_fn`` (the model's own loss is taken whenever there is one).

        Returns:
            The result; empty on ranks without the last stage.

        Raises:
            ScheduleError: If an action fails; names it, with the original error as the cause.
            PeerError: If another rank was lost.
        """
        if train and torch.is_inference_mode_enabled():
            raise ScheduleError("train=True cannot run inside torch.inference_mode().")
        part = self.part
        todo = rank_program(
            self.config.schedule,
            part.chunks,
            len(microbatches),
            train=train,
            rank=part.rank,
            recompute=train and self.config.recompute == "full",
        )
        step = _Step(self, microbatches, todo, train=train)
        step.work.want_logits, step.work.want_loss = want_logits and part.has_loss, want_loss
        with torch.enable_grad() if train else torch.no_grad():
            if step.hooks.active:
                with self._guarded("start of the step"):
                    step.hooks.open()
            for action in todo.actions:
                if completing is not None and action in todo.completes:
                    with completing(action.stage):
                        self._execute(action, step)
                else:
                    self._execute(action, step)
            self._finish(step)
        return step.work.result

    def _execute(self, action: Action, step: _Step) -> None:
        stage, microbatch = action.stage, action.microbatch
        try:
            with self._guarded(str(action), stage, microbatch):
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

    def _guarded(
        self, what: str, stage: int | None = None, microbatch: int | None = None
    ) -> AbstractContextManager[None]:
        if self.guard is None:
            return nullcontext()
        stage = self.part.stages[0].index if stage is None else stage
        return self.guard(what, stage=stage, microbatch=microbatch)


class _Step:
    """One run of a row: the messages, and what they are handed to."""

    def __init__(
        self,
        engine: Engine,
        microbatches: Sequence[Mapping[str, Any]],
        todo: RankProgram,
        *,
        train: bool,
    ) -> None:
        chunks = engine.part.chunks
        self.links = engine.links
        self.taken = todo.taken
        self.work = Work(engine.worker, microbatches, train=train, recomputed=todo.recomputed)
        self.hooks = engine.hooks.begin(engine, len(microbatches), train=train)
        autocast = self.work.autocast
        self.keys = [(autocast, *signature_of(one)) for one in microbatches]
        self.last = chunks.stages - 1
        # Boundaries inside of this rank, by the stage before: handed over in memory.
        self.local = {s.index for s in engine.part.stages if not s.is_last} & {
            stage for stage in range(self.last) if chunks.is_local(stage)
        }
        self.outputs: dict[Place, Tensors] = {}
        self.input_gradients: dict[Place, Sequence[Tensor]] = {}
        self.inputs: dict[Place, Expected] = {}
        self.gradients: dict[Place, Expected] = {}
        self.sends: dict[Action, Sent] = {}
        self.handlers: Mapping[Kind, Callable[[Action], None]] = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT: self.backward,
            Kind.WEIGHT: lambda action: self.work.backward_weight(_place(action)),
            Kind.RECOMPUTE: lambda action: self.work.recompute(_place(action)),
            Kind.SEND_FORWARD: self.send_forward,
            Kind.RECEIVE_FORWARD: self.receive_forward,
            Kind.SEND_BACKWARD: self.send_backward,
            Kind.RECEIVE_BACKWARD: self.receive_backward,
        }

    def receive_forward(self, action: Action) -> None:
        stage, _, microbatch = action
        key = ("F", stage - 1, self.keys[microbatch])
        self.inputs[_place(action)] = self.links.forward(stage - 1).receive(key=key)

    def send_forward(self, action: Action) -> None:
        stage, _, microbatch = action
        key, output = ("F", stage, self.keys[microbatch]), self.outputs.pop(_place(action))
        self.sends[action] = self.links.forward(stage).send(output, key=key)

    def receive_backward(self, action: Action) -> None:
        stage, _, microbatch = action
        key, expected = ("B", stage, self.keys[microbatch]), self.work.metas[_place(action)]
        self.gradients[_place(action)] = self.links.backward(stage).receive(
            key=key, expected=expected
        )

    def send_backward(self, action: Action) -> None:
        stage, _, microbatch = action
        key = ("B", stage - 1, self.keys[microbatch])
        output = self.input_gradients.pop(_place(action))
        self.sends[action] = self.links.backward(stage - 1).send(output, key=key)

    def forward(self, action: Action) -> None:
        stage, _, microbatch = action
        received: Tensors = ()
        if stage - 1 in self.local:
            handed = self.outputs.pop((stage - 1, microbatch))
            received = tuple(tensor.detach() for tensor in handed)
        elif stage > 0:
            received = self._wait(self.inputs, action)
        output = self.work.forward(_place(action), received)
        if stage < self.last:
            self.outputs[_place(action)] = output

    def backward(self, action: Action) -> None:
        stage, kind, microbatch = action
        gradients: Tensors | None = None
        if stage in self.local:
            gradients = tuple(self.input_gradients.pop((stage + 1, microbatch)))
        elif stage < self.last:
            gradients = self._wait(self.gradients, action)
        run = self.work.backward if kind is Kind.BACKWARD else self.work.backward_input
        result = run(_place(action), gradients)
        if stage > 0:
            self.input_gradients[_place(action)] = result

    def _wait(self, pending: dict[Place, Expected], action: Action) -> Tensors:
        """Wait for an action's message, and free the sends that the sender took before it."""
        tensors = pending.pop(_place(action)).wait()
        self.hooks.arrived(action)
        for send in self.taken.get(action, ()):
            self.sends.pop(send).wait()
            self.hooks.after(send)
        self.hooks.before(action)
        return tensors


def _place(action: Action) -> Place:
    return action.stage, action.microbatch
