"""Callbacks see every action of the table exactly once, in order, and may end the run."""

from __future__ import annotations

import timeit
from typing import Any

import pytest

from goose_strategy import PipelineCallback, PipelineEvent, PipelineStep
from goose_strategy.errors import CallbackError, ConfigError, PeerError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.hooks import HOOK_NAMES, PipelineHooks, StepHooks
from goose_strategy.pipeline_parallel.microbatch import split_batch
from goose_strategy.pipeline_parallel.program import rank_program
from goose_strategy.pipeline_parallel.schedule import Action, Kind
from tests.pipeline_parallel.cases import batch_of, model_of
from tests.pipeline_parallel.threads import Pipeline, make_pipeline

Log = list[tuple[str, str, Any]]
NAMES = sorted({f"{when}_{name}" for when in ("before", "after") for name in HOOK_NAMES.values()})
COMPUTE = ("F", "B")


class Logger(PipelineCallback):
    """Writes every call into a list; several may share one."""

    def __init__(self, log: Log, name: str = "") -> None:
        self.log, self.name = log, name


def _logging(method: str) -> Any:
    def log(self: Logger, told: Any) -> None:
        self.log.append((self.name, method, told))

    return log


for _method in [*NAMES, "before_step", "after_step"]:
    setattr(Logger, _method, _logging(_method))


def pipeline_with_logs(schedule: str, pp: int) -> tuple[Pipeline, list[Log]]:
    pipeline = make_pipeline(model_of("llama"), pp, config=PipelineConfig(schedule=schedule))
    logs: list[Log] = [[] for _ in range(pp)]
    for engine, log in zip(pipeline.engines, logs, strict=True):
        engine.hooks.add(Logger(log))
    return pipeline, logs


def parts(number: int) -> list[dict[str, Any]]:
    return split_batch(batch_of(number), PipelineConfig(num_microbatches=number), stages=2)


def events(log: Log, when: str) -> list[PipelineEvent]:
    chosen = [told for _, method, told in log if method.startswith(when)]
    return [told for told in chosen if isinstance(told, PipelineEvent)]


def as_action(event: PipelineEvent) -> Action:
    return Action(event.stage, Kind(event.kind), event.microbatch)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("pp", "number"), [(2, 3), (4, 6), (4, 2)])
def test_every_action_of_the_table_is_told_once(
    pp: int, number: int, schedule: str, train: bool
) -> None:
    pipeline, logs = pipeline_with_logs(schedule, pp)
    pipeline.run(parts(number), train=train)
    for stage, log in enumerate(logs):
        row = rank_program(schedule, pp, number, train=train, rank=stage).actions
        launched = [as_action(event) for event in events(log, "before")]
        over = [as_action(event) for event in events(log, "after")]
        assert sorted(launched) == sorted(row)
        assert sorted(over) == sorted(row)
        # Work and launches of sends keep the table's order; a wait lies before the work it is for.
        assert [a for a in launched if a.kind in COMPUTE] == [a for a in row if a.kind in COMPUTE]
        sends_and_work = [a for a in row if not a.kind.startswith("RECV")]
        assert [a for a in launched if not a.kind.startswith("RECV")] == sends_and_work
        receives = [a for a in row if a.kind.startswith("RECV")]
        assert [a for a in launched if a.kind.startswith("RECV")] == receives
        check_nesting(log)
        name = schedule if train else "forward_only"
        for event in events(log, ""):
            assert (event.stage, event.rank, event.schedule) == (stage, stage, name)
            assert (event.step, event.train) == (0, train)
        first, last = log[0], log[-1]
        step = PipelineStep(0, name, train, stage, (stage,), pp, number)
        assert (first[1:], last[1:]) == (("before_step", step), ("after_step", step))


def check_nesting(log: Log) -> None:
    """Each method belongs to its kind; work is not interrupted; messages surround no half of it."""
    told = [(method, event) for _, method, event in log if isinstance(event, PipelineEvent)]
    position = {
        (method.split("_")[0], as_action(event)): i for i, (method, event) in enumerate(told)
    }
    assert len(position) == len(told)
    for method, event in told:
        assert method.split("_", 1)[1] == HOOK_NAMES[event.kind]
        action = as_action(event)
        before, after = position["before", action], position["after", action]
        assert before < after
        if event.kind in COMPUTE:
            assert after == before + 1
            message = action._replace(kind=Kind(f"RECV_{event.kind}"))
            if ("after", message) in position:
                assert position["before", message] < position["after", message] < before
            message = action._replace(kind=Kind(f"SEND_{event.kind}"))
            if ("after", message) in position:
                assert after < position["before", message]
    # The same object before and after.
    pairs = {as_action(event): event for method, event in told if method.startswith("before")}
    assert all(pairs[as_action(event)] is event for _, event in told)


def test_a_receive_is_over_only_once_the_message_is_there() -> None:
    """A stage whose neighbour is slow is waiting, not working."""
    pipeline, _ = pipeline_with_logs("1F1B", 2)
    order: list[str] = []

    class Slow(PipelineCallback):
        def after_forward(self, event: PipelineEvent) -> None:
            order.append("first stage has computed")

    class Waiting(PipelineCallback):
        def before_receive(self, event: PipelineEvent) -> None:
            order.append("posted")

        def after_receive(self, event: PipelineEvent) -> None:
            order.append("arrived")

        def before_forward(self, event: PipelineEvent) -> None:
            order.append("works")

    pipeline.engines[0].hooks.add(Slow())
    pipeline.engines[1].hooks.add(Waiting())
    pipeline.run(parts(1), train=False)
    assert order.index("first stage has computed") < order.index("arrived") < order.index("works")
    assert order.index("posted") < order.index("arrived")


def test_callbacks_are_called_in_the_order_of_their_registration() -> None:
    pipeline, _ = pipeline_with_logs("1F1B", 2)
    log: Log = []
    hooks = pipeline.engines[0].hooks
    hooks.remove(hooks.callbacks[0])
    for name in ("first", "second", "third"):
        hooks.add(Logger(log, name))
    hooks.add(hooks.callbacks[0])  # stays where it is
    pipeline.run(parts(2), train=True)
    for three in (log[i : i + 3] for i in range(0, len(log), 3)):
        assert [name for name, _, _ in three] == ["first", "second", "third"]
        assert len({(method, told) for _, method, told in three}) == 1


def test_calls_are_numbered_whether_or_not_anybody_listens() -> None:
    pipeline, logs = pipeline_with_logs("1F1B", 2)
    hooks = pipeline.engines[0].hooks
    (callback,) = hooks.callbacks
    pipeline.run(parts(1), train=True)
    hooks.remove(callback)
    pipeline.run(parts(1), train=False)
    hooks.add(callback)
    pipeline.run(parts(1), train=True)
    assert sorted({told.step for _, _, told in logs[0]}) == [0, 2]
    assert sorted({told.step for _, _, told in logs[1]}) == [0, 1, 2]


def test_a_callback_does_not_change_what_is_computed() -> None:
    batches = parts(4)
    plain = make_pipeline(model_of("llama"), 2)
    heard, _ = pipeline_with_logs("1F1B", 2)
    losses = [one.run(batches, train=True)[-1].loss for one in (plain, heard)]
    assert losses[0] == losses[1]
    theirs = plain.gradients()
    assert all(gradient.equal(theirs[name]) for name, gradient in heard.gradients().items())


class Failing(PipelineCallback):
    def after_backward(self, event: PipelineEvent) -> None:
        if event.microbatch == 1:
            raise ArithmeticError("a bug of mine")


class FailingStep(PipelineCallback):
    def before_step(self, step: PipelineStep) -> None:
        raise ArithmeticError("a bug of mine")


@pytest.mark.parametrize(
    ("callback", "named"),
    [
        (Failing(), r"Failing.after_backward\(PipelineEvent\(microbatch=1, stage=0, .*kind='B'"),
        (FailingStep(), r"FailingStep.before_step\(PipelineStep\(step=0"),
    ],
)
def test_an_error_names_the_callback_and_the_event(callback: PipelineCallback, named: str) -> None:
    pipeline, _ = pipeline_with_logs("1F1B", 2)
    pipeline.engines[0].hooks.add(callback)
    with pytest.raises(CallbackError, match=named + ".*ArithmeticError: a bug of mine") as caught:
        pipeline.run(parts(2), train=True)
    assert isinstance(caught.value.__cause__, ArithmeticError)
    assert (caught.value.rank, caught.value.stage) == (0, 0)


def test_the_loss_of_a_peer_is_not_blamed_on_the_callback() -> None:
    class Peer(PipelineCallback):
        def before_step(self, step: PipelineStep) -> None:
            raise PeerError("rank 3 is gone")

    pipeline, _ = pipeline_with_logs("1F1B", 2)
    pipeline.engines[0].hooks.add(Peer())
    with pytest.raises(PeerError, match="rank 3 is gone"):
        pipeline.run(parts(1), train=True)


def test_what_is_no_callback_or_never_called_is_refused() -> None:
    class Misnamed(PipelineCallback):
        def on_before_forward(self, event: PipelineEvent) -> None: ...

    hooks = PipelineHooks()
    with pytest.raises(ConfigError, match="is no PipelineCallback"):
        hooks.add(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Misnamed would never be called.*before_forward"):
        hooks.add(Misnamed())
    with pytest.raises(ConfigError, match="Failing is not registered"):
        hooks.remove(Failing())
    assert hooks.callbacks == ()


def test_all_kinds_have_methods_also_those_of_split_and_recomputed_backwards() -> None:
    # T sums the gradients of a tied weight, which is nothing of one microbatch.
    assert {kind.value for kind in Kind} - {"T"} <= set(HOOK_NAMES)
    log: Log = []
    hooks = PipelineHooks()
    hooks.add(Logger(log))
    step = StepHooks(hooks._methods, PipelineStep(0, "ZB", True, 5, 1, 2, 1))
    receive = Action(1, Kind.RECEIVE_BACKWARD, 0)
    step.launch(receive)
    for kind in ("R", "I", "W"):
        action = Action(1, _Other(kind), 0)  # type: ignore[arg-type]
        step.launch(action)
        if kind == "I":
            step.arrived(action)
            step.before(action)
        step.finish(action)
    tie = Action(1, _Other("T"), 0)  # type: ignore[arg-type]
    step.launch(tie)
    step.finish(tie)
    assert [(method, told.kind) for _, method, told in log] == [
        ("before_receive", "RECV_B"),
        ("before_recompute", "R"),
        ("after_recompute", "R"),
        ("after_receive", "RECV_B"),
        ("before_backward", "I"),
        ("after_backward", "I"),
        ("before_weight_gradient", "W"),
        ("after_weight_gradient", "W"),
    ]


class _Other(str):
    """A kind that this version's tables do not hold yet."""

    @property
    def value(self) -> str:
        return str(self)


def test_nobody_listening_costs_less_than_a_microsecond_per_action() -> None:
    hooks = StepHooks({}, PipelineStep(0, "1F1B", True, 0, 0, 2, 1))
    action = Action(0, Kind.FORWARD, 0)

    def one(hooks: StepHooks = hooks) -> None:
        hooks.launch(action)
        hooks.arrived(action)
        hooks.before(action)
        hooks.finish(action)

    # The best of many short runs: this machine may be busy.
    assert min(timeit.repeat(one, number=1000, repeat=50)) / 1000 < 1e-6
