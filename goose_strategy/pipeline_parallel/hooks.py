"""Callbacks around every action of a pipeline.

Lightning's callbacks see a batch as a whole, and torch's pipeline runtime offers none; what happens
to one microbatch on one stage cannot be seen from either. Here a callback is told before and after
each action, so that a timeline, a monitor of memory or a test needs no change in the engine.

The methods are named ``before_*`` and ``after_*`` without Lightning's ``on_``: its own
``on_before_backward(trainer, module, loss)`` is another thing, and one class may be both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from goose_strategy.errors import CallbackError, ConfigError, PeerError
from goose_strategy.pipeline_parallel.schedule import Action, Kind

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.pipeline_parallel.engine import Engine

# By the values of `Kind`, as schedules that split the backward (I, W) or recompute (R) name them.
HOOK_NAMES: Mapping[str, str] = {
    "F": "forward",
    "B": "backward",
    "I": "backward",
    "W": "weight_gradient",
    "R": "recompute",
    "SEND_F": "send",
    "SEND_B": "send",
    "RECV_F": "receive",
    "RECV_B": "receive",
}
"""Which pair of methods is called for a kind of action; none for a kind that is not here."""
_RECEIVE_OF = {"F": Kind.RECEIVE_FORWARD, "B": Kind.RECEIVE_BACKWARD, "I": Kind.RECEIVE_BACKWARD}
_RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
_MESSAGES = (*_RECEIVES, Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


class Guard(Protocol):
    """Surrounds every action, as ``Watchdog.guard`` does."""

    def __call__(
        self, what: str, *, stage: int | None = None, microbatch: int | None = None
    ) -> AbstractContextManager[None]:
        """Return the context of one action."""


class PipelineEvent(NamedTuple):
    """One action of one call; the same object before and after it.

    Attributes:
        microbatch: Index of the microbatch.
        stage: Stage that acts.
        rank: Global rank.
        schedule: The name of the schedule, or ``"forward_only"`` in a call without gradients.
        step: Number of the pipelined call, counted from 0 over all models, evaluations included.
        kind: What happens, in the notation of the tables: ``"F"``, ``"B"``, ``"SEND_F"``...
        train: Whether the call runs backwards too.
    """

    microbatch: int
    stage: int
    rank: int
    schedule: str
    step: int
    kind: str
    train: bool


class PipelineStep(NamedTuple):
    """One pipelined call, as one rank runs it.

    Attributes:
        step: Number of the call, counted from 0 over all models, evaluations included.
        schedule: As in `PipelineEvent`.
        train: Whether the call runs backwards too.
        rank: Global rank.
        held: Stages of this rank.
        stages: Number of stages.
        microbatches: Number of microbatches.
        mesh: The mesh, if there is one.
    """

    step: int
    schedule: str
    train: bool
    rank: int
    held: tuple[int, ...]
    stages: int
    microbatches: int
    mesh: ParallelMesh | None = None


class PipelineCallback:
    """Base of callbacks around the actions of a pipeline; override what you need.

    Register an object with ``strategy.add_pipeline_callback(callback)`` on either door, or pass it
    in ``Fabric(callbacks=[...])`` (``fabric.setup`` registers it then, ``fabric.setup_module`` asks
    no callback) or in ``Trainer(callbacks=[...])``, where it must be a Lightning ``Callback``, too;
    in a plain loop it is ``runtime.hooks.add(callback)``.

    All methods run on the rank and the thread that execute the action, between the actions of the
    table, so that their time is added to the step's. They may read anything, but must not draw
    random numbers or communicate: neighbours are in the middle of their own rows. With ``pp=1``
    there are no actions, and no method is called.

    What ``before`` and ``after`` mean:

    - forward, backward, weight gradient, recompute: the stage's own work. Waiting for a message
      comes before ``before``, so the time between the two is work, not idleness. On a GPU it is
      the time of the launches.
    - send, receive: ``before`` is the launch, and ``after`` the moment at which this rank knows
      that the message is through. Other actions come between the two.

    An exception ends the run on all ranks, with the callback and the event in its message.
    """

    def before_step(self, step: PipelineStep) -> None:
        """Be told that a pipelined call begins; the ranks may still communicate here."""

    def after_step(self, step: PipelineStep) -> None:
        """Be told that the last action of a pipelined call has ended, all messages included."""

    def before_forward(self, event: PipelineEvent) -> None:
        """Be told that the stage begins a microbatch's forward; its input is there."""

    def after_forward(self, event: PipelineEvent) -> None:
        """Be told that the forward has ended."""

    def before_backward(self, event: PipelineEvent) -> None:
        """Be told that the stage begins a microbatch's backward; its gradient is there.

        In a schedule that splits the backward (``event.kind == "I"``) it is the part that computes
        the gradients of the stage's inputs.
        """

    def after_backward(self, event: PipelineEvent) -> None:
        """Be told that the backward has ended."""

    def before_weight_gradient(self, event: PipelineEvent) -> None:
        """Be told that the weights' part of a split backward begins."""

    def after_weight_gradient(self, event: PipelineEvent) -> None:
        """Be told that the weights' part of a split backward has ended."""

    def before_recompute(self, event: PipelineEvent) -> None:
        """Be told that a forward is run again, to have its activations for the backward."""

    def after_recompute(self, event: PipelineEvent) -> None:
        """Be told that the activations are there."""

    def before_send(self, event: PipelineEvent) -> None:
        """Be told that a message is handed over (``event.kind``: ``SEND_F`` or ``SEND_B``)."""

    def after_send(self, event: PipelineEvent) -> None:
        """Be told that its tensors may be freed, at the latest at the end of the call."""

    def before_receive(self, event: PipelineEvent) -> None:
        """Be told that a receive is posted (``event.kind``: ``RECV_F`` or ``RECV_B``)."""

    def after_receive(self, event: PipelineEvent) -> None:
        """Be told that the message is there, when the action that needs it has waited for it."""

    def on_after_setup(self, fabric: Any, module: Any) -> None:  # noqa: ARG002  Fabric's names
        """Register this object; Fabric calls it at the end of ``fabric.setup(model)``.

        Under a strategy without a pipeline nothing is registered.
        """
        add = getattr(fabric.strategy, "add_pipeline_callback", None)
        if add is not None:
            add(self)


_Calls: TypeAlias = tuple[Callable[[Any], None], ...]
_METHODS = {
    (when, kind): f"{when}_{name}"
    for when in ("before", "after")
    for kind, name in HOOK_NAMES.items()
}
_STEP = ("before_step", "after_step")


class PipelineHooks:
    """The callbacks of a runtime, in the order of their registration.

    Attributes:
        callbacks: The registered callbacks.
        calls: Number of pipelined calls so far.
        mesh: The mesh, once it exists.
    """

    def __init__(self) -> None:
        self.callbacks: tuple[PipelineCallback, ...] = ()
        self.calls = 0
        self.mesh: ParallelMesh | None = None
        self._methods: dict[str, _Calls] = {}

    def add(self, callback: PipelineCallback) -> None:
        """Register a callback; one that is registered already stays where it is.

        Raises:
            ConfigError: If it is no `PipelineCallback`, or overrides none of its methods.
        """
        known = sorted({*_METHODS.values(), *_STEP})
        if not isinstance(callback, PipelineCallback):
            raise ConfigError(
                f"callback={callback!r} is no PipelineCallback; derive its class from "
                "goose_strategy.PipelineCallback."
            )
        if not any(_overrides(callback, name) for name in known):
            raise ConfigError(
                f"callback {type(callback).__name__} would never be called; define one of "
                f"{', '.join(known)}."
            )
        if all(callback is not other for other in self.callbacks):
            self._set((*self.callbacks, callback))

    def remove(self, callback: PipelineCallback) -> None:
        """Take a callback out; a call under way goes on with it.

        Raises:
            ConfigError: If it is not registered.
        """
        left = tuple(other for other in self.callbacks if other is not callback)
        if len(left) == len(self.callbacks):
            raise ConfigError(f"callback {type(callback).__name__} is not registered.")
        self._set(left)

    def _set(self, callbacks: tuple[PipelineCallback, ...]) -> None:
        self.callbacks = callbacks
        self._methods = {
            name: calls
            for name in {*_METHODS.values(), *_STEP}
            if (calls := tuple(getattr(c, name) for c in callbacks if _overrides(c, name)))
        }

    def begin(self, engine: Engine, microbatches: int, *, train: bool) -> StepHooks:
        """Number a call of an engine and return what is called in it."""
        part = engine.part
        step = PipelineStep(
            step=self.calls,
            schedule=engine.config.schedule if train else "forward_only",
            train=train,
            rank=part.rank if engine.rank is None else engine.rank,
            held=part.chunks.stages_of(part.rank),
            stages=part.chunks.stages,
            microbatches=microbatches,
            mesh=self.mesh,
        )
        self.calls += 1
        return StepHooks(self._methods, step)


class StepHooks:
    """The callbacks of one call; the engine says what happens.

    Args:
        methods: Bound methods by name.
        step: The call.

    Attributes:
        active: Whether there is anybody to tell.
    """

    def __init__(self, methods: Mapping[str, _Calls], step: PipelineStep) -> None:
        self.active = bool(methods)
        self._methods = methods
        self._step = step
        self._events: dict[Action, PipelineEvent] = {}
        self._expected: set[Action] = set()

    def open(self) -> None:
        """Say that the call begins."""
        self._tell("before_step", self._step)

    def close(self) -> None:
        """Say that the call has ended."""
        if self.active:
            self._tell("after_step", self._step)

    def launch(self, action: Action) -> None:
        """Say that an action begins, unless it waits for a message first; then see `arrived`."""
        if not self.active:
            return
        if action.kind in _RECEIVES:
            self._expected.add(action)
        elif self._awaited(action) in self._expected:
            return
        self.before(action)

    def arrived(self, action: Action) -> None:
        """Say that the message is there for which an action waited."""
        if not self.active:
            return
        message = self._awaited(action)
        if message is not None:
            self._expected.discard(message)
            self.after(message)

    def finish(self, action: Action) -> None:
        """Say that an action has been executed; of a message, that is only the launch."""
        if self.active and action.kind not in _MESSAGES:
            self.after(action)

    def before(self, action: Action) -> None:
        """Say that an action begins."""
        if self.active:
            self._tell(_METHODS.get(("before", action.kind.value)), action)

    def after(self, action: Action) -> None:
        """Say that an action is over."""
        if self.active:
            self._tell(_METHODS.get(("after", action.kind.value)), action)

    def _awaited(self, action: Action) -> Action | None:
        kind = _RECEIVE_OF.get(action.kind.value)
        return None if kind is None else action._replace(kind=kind)

    def _tell(self, method: str | None, what: Action | PipelineStep) -> None:
        calls = None if method is None else self._methods.get(method)
        if calls is None:
            return
        told = self._event(what) if isinstance(what, Action) else what
        for call in calls:
            try:
                call(told)
            except PeerError:
                raise
            except Exception as error:
                raise _failure(call, told, error) from error

    def _event(self, action: Action) -> PipelineEvent:
        event = self._events.get(action)
        if event is None:
            step = self._step
            event = self._events[action] = PipelineEvent(
                action.microbatch,
                action.stage,
                step.rank,
                step.schedule,
                step.step,
                action.kind.value,
                step.train,
            )
        return event


def _overrides(callback: PipelineCallback, name: str) -> bool:
    """Tell whether a callback defines a method itself."""
    method = getattr(callback, name)
    return getattr(method, "__func__", method) is not getattr(PipelineCallback, name)


def _failure(
    call: Callable[[Any], None], told: PipelineEvent | PipelineStep, error: Exception
) -> CallbackError:
    owner: object = getattr(call, "__self__", call)
    stage = microbatch = None
    shown: object = told
    if isinstance(told, PipelineEvent):
        stage, microbatch = told.stage, told.microbatch
    else:
        stage = told.held[0]
        shown = told._replace(mesh=None)
    return CallbackError(
        f"callback {type(owner).__name__}.{getattr(call, '__name__', 'call')}({shown}) failed: "
        f"{type(error).__name__}: {error}",
        rank=told.rank,
        stage=stage,
        microbatch=microbatch,
    )
