"""Several stages on one rank, and split backwards: when buckets start, and that sums are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.data_parallel.config import ZeroConfig
from goose_strategy.data_parallel.reducer import Reducer
from goose_strategy.grads.store import WeightGradStore, WeightGradWork
from goose_strategy.tensor_parallel.defer import defer_weight_gradients
from tests.data_parallel.toy import largest_gap, make_mesh
from tests.harness.worker import Context
from tests.harness.world import run_ranks

MICROBATCHES = 3
WHOLE = {
    1: "0B0 0B1 0B2",
    2: "1B0 0B0 1B1 0B1 1B2 0B2",
}
SPLIT = {
    1: "0I0 0I1 0W0 0I2 0W1 0W2",
    2: "1I0 0I0 1W0 1I1 0I1 0W0 1I2 1W1 0I2 0W1 1W2 0W2",
}
# A whole backward between others, and a stage whose weights come after its input gradients.
MIXED = {2: "1I0 0B0 1W0 1B1 0I1 0W1 1I2 0I2 1W2 0W2"}


class Model(nn.Module):
    """Layers that push and parameters that do not, for two stages, and one that both use."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = stages
        self.embed = nn.Embedding(9, 20)
        self.first = nn.Linear(20, 30)
        self.first_norm = nn.LayerNorm(30)
        self.second = nn.Linear(30, 40, bias=False)
        self.second_norm = nn.LayerNorm(40)
        self.third = nn.Linear(40, 7)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def run(self, stage: int, x: Tensor) -> Tensor:
        if stage == 0:
            x = torch.tanh(self.first_norm(self.first(self.embed(x)))) * self.gain
        if stage == self.stages - 1:
            x = self.third(torch.tanh(self.second_norm(self.second(x)))) * self.gain
            x = x.square().mean()
        return x

    def stage_of(self) -> dict[str, int]:
        names = [name for name, _ in self.named_parameters() if name != "gain"]
        return {name: int(not name.startswith(("embed", "first"))) for name in names}


def _model(stages: int) -> Model:
    torch.manual_seed(4)
    return Model(stages).double()


def _ids(microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randint(0, 9, (8, 5), generator=generator)


class Event(NamedTuple):
    """A bucket that started.

    Attributes:
        action: In which action, ``""`` after all of them.
        names: The bucket's parameters.
    """

    action: str
    names: tuple[str, ...]


class Runner:
    """Executes a row of actions as an engine does.

    Args:
        model: The stages.
        rows: The rows of each microbatch that this rank has.
        reducer: Told which actions complete a stage.
    """

    def __init__(self, model: Model, rows: slice, reducer: Reducer | None = None) -> None:
        self.model, self.rows, self.reducer = model, rows, reducer
        self.store = WeightGradStore()
        self.now = ""
        self.restore = defer_weight_gradients(model, self.store)

    def run(self, text: str) -> None:
        actions = text.split()
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self.work: dict[tuple[int, int], WeightGradWork] = {}
        for microbatch in range(MICROBATCHES):
            x = _ids(microbatch)[self.rows]
            for stage in range(self.model.stages):
                if stage:
                    x = x.detach().requires_grad_()
                self.inputs[stage, microbatch] = x
                x = self.outputs[stage, microbatch] = self.model.run(stage, x)
        for number, action in enumerate(actions):
            self.now = action
            with self._completing(action, actions[number + 1 :]):
                self._execute(action[1], (int(action[0]), int(action[2])))
        self.now = ""

    def _completing(self, action: str, later: list[str]) -> AbstractContextManager[None]:
        """Surround a stage's last B or I, and its last B or W."""
        stage, kind = action[0], action[1]
        left = {other[1] for other in later if other[0] == stage}
        if self.reducer is None or all(left & set(pair) for pair in ("BI", "BW") if kind in pair):
            return nullcontext()
        return self.reducer.completing(int(stage))

    def _execute(self, kind: str, place: tuple[int, int]) -> None:
        if kind == "W":
            self.work.pop(place).run()
            return
        output = self.outputs.pop(place)
        is_last = place[0] == self.model.stages - 1
        seed = None if is_last else self.inputs.pop((place[0] + 1, place[1])).grad
        with self.store.collecting() if kind == "I" else nullcontext():
            output.backward(seed)
        if kind == "I":
            self.work[place] = self.store.take()


def _reference(stages: int) -> dict[str, Tensor]:
    model = _model(stages)
    for microbatch in range(MICROBATCHES):
        x = _ids(microbatch)
        for stage in range(stages):
            x = model.run(stage, x)
        x.backward()
    return {name: param.grad for name, param in model.named_parameters()}


def _on_rank(
    ctx: Context, stages: int, text: str, told: bool, fault: str = ""
) -> tuple[list[Event], dict[str, Tensor]]:
    model = _model(stages)
    mesh = make_mesh(ctx.world_size)
    reducer = Reducer(
        list(model.named_parameters()),
        {},
        mesh,
        config=ZeroConfig(bucket_numel=700),
        average=True,
        owner_of={},
        stage_of=model.stage_of() if told else None,
    )
    share = 8 // ctx.world_size
    runner = Runner(model, slice(ctx.rank * share, (ctx.rank + 1) * share), reducer)
    events: list[Event] = []
    for bucket in reducer.buckets:
        _watch(bucket, runner, events)
    with _planted(reducer, fault):
        for _ in range(2):
            events.clear()
            call = reducer.begin_call(sync=True)
            runner.run(text)
            reducer.end_call(call)
            reducer.release(call, 0.5)
    gradients = reducer.full_gradients()
    reducer.close()
    mesh.close()
    return events, gradients


def _watch(bucket: Any, runner: Runner, events: list[Event]) -> None:
    reduce = bucket.reduce

    def watched() -> None:
        events.append(Event(runner.now, tuple(slot.name for slot in bucket.slots)))
        reduce()

    bucket.reduce = watched


@contextmanager
def _planted(reducer: Reducer, fault: str) -> Iterator[None]:
    calls = reducer._calls
    if fault == "marks in every action":
        calls.completing = lambda stage: _always(reducer)
    if fault == "never marks":
        calls.completing = lambda stage: nullcontext()
    yield


@contextmanager
def _always(reducer: Reducer) -> Iterator[None]:
    reducer._rounds.ready.counting = True
    yield


def _check_order(events: list[Event], text: str, stage_of: dict[str, int]) -> None:
    """Every bucket starts in the last action of its stage, the last stage's first."""
    last = {action[0]: action for action in text.split() if action[1] in "BW"}
    early = [event for event in events if "gain" not in event.names]
    assert [event.names for event in events if "gain" in event.names] == [("gain",)] or not stage_of
    stages = []
    for event in early:
        (stage,) = {stage_of.get(name, 0) for name in event.names}
        stages.append(stage)
        assert event.action == last[str(stage)], event
    assert stages == sorted(stages, reverse=True)
    assert len(early) >= 2 * len(set(stages))
    assert {name for event in early for name in event.names} >= stage_of.keys()
    if stage_of:
        assert events[-1] == Event("", ("gain",)), "what both stages use waits for the end"


@pytest.mark.parametrize(
    "text", [WHOLE[2], SPLIT[2], MIXED[2]], ids=["whole", "split", "mixed"]
)  # fmt: skip
def test_each_of_two_stages_starts_its_buckets_in_its_last_action(text: str) -> None:
    expected = _reference(2)
    results = run_ranks(_on_rank, 2, 2, text, True)
    for events, gradients in results:
        assert events == results[0][0], "all replicas launch in one order"
        _check_order(events, text, _model(2).stage_of())
        assert largest_gap(gradients, expected) < 1e-12


@pytest.mark.parametrize("text", [WHOLE[1], SPLIT[1]], ids=["whole", "split"])
def test_one_stage_starts_its_buckets_in_its_last_action(text: str) -> None:
    expected = _reference(1)
    for events, gradients in run_ranks(_on_rank, 2, 1, text, False):
        _check_order(events, text, {})
        assert {event.action for event in events} == {text.split()[-1]}
        assert largest_gap(gradients, expected) < 1e-12


def _unmarked(ctx: Context, fault: str) -> tuple[list[Event], dict[str, Tensor]]:
    return _on_rank(ctx, 2, SPLIT[2], True, fault)


@pytest.mark.parametrize("fault", ["marks in every action", "never marks"])
def test_buckets_that_start_too_early_or_too_late_are_seen(fault: str) -> None:
    for events, gradients in run_ranks(_unmarked, 2, fault):
        with pytest.raises(AssertionError):
            _check_order(events, SPLIT[2], _model(2).stage_of())
        # Wherever a bucket starts, nothing is lost and nothing is counted twice.
        assert largest_gap(gradients, _reference(2)) < 1e-12
