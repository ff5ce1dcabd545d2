"""Pipeline callbacks are registered through both doors, and one that raises ends all ranks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from lightning.fabric import Fabric
from lightning.pytorch import Callback

from goose_strategy import (
    Goose3DFabricStrategy,
    Goose3DStrategy,
    PipelineCallback,
    PipelineConfig,
    PipelineEvent,
    PipelineStep,
)
from goose_strategy.errors import ConfigError
from tests.harness.models import batches, tiny_model
from tests.harness.worker import Context
from tests.harness.world import Death, run_ranks
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.ranks import attempt, good, make_fabric, world

BATCH = batches(1)[0]


class Count(PipelineCallback):
    """Counts calls, and keeps the last event."""

    def __init__(self, order: list[str] | None = None, name: str = "") -> None:
        self.steps: list[PipelineStep] = []
        self.work: list[PipelineEvent] = []
        self.order = [] if order is None else order
        self.name = name

    def before_step(self, step: PipelineStep) -> None:
        self.steps.append(step._replace(mesh=None))
        assert step.mesh is not None
        assert step.mesh.rank == step.rank
        self.order.append(self.name)

    def after_forward(self, event: PipelineEvent) -> None:
        self.work.append(event)

    def after_backward(self, event: PipelineEvent) -> None:
        self.work.append(event)

    def told(self) -> list[Any]:
        return [
            [(step.step, step.train, step.held) for step in self.steps],
            [(event.step, event.kind, event.microbatch) for event in self.work],
        ]


class TrainerCount(Count, Callback):
    """The same as a callback of the Trainer, whose own hooks of like names it keeps."""

    def __init__(self, order: list[str] | None = None, name: str = "") -> None:
        super().__init__(order, name)
        self.losses = 0

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.losses += 1


def _through_the_strategy(ctx: Context) -> Any:
    fabric = make_fabric(ctx, 1, 2)
    callback = Count()
    fabric.strategy.add_pipeline_callback(callback)
    model = fabric.setup(tiny_model("llama"))
    fabric.backward(model(**BATCH).loss)
    fabric.strategy.remove_pipeline_callback(callback)
    fabric.backward(model(**BATCH).loss)
    return callback.told()


def _through_fabrics_callbacks(ctx: Context) -> Any:
    order: list[str] = []
    callbacks = [Count(order, "first"), Count(order, "second")]
    strategy = Goose3DFabricStrategy(pp=2, pipeline=PipelineConfig(num_microbatches=2))
    fabric = Fabric(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        precision="64-true",
        callbacks=callbacks,
    )
    fabric.launch()
    model = fabric.setup(tiny_model("llama"))
    # A second model calls the same objects, not twice as many.
    other = fabric.setup(tiny_model("llama"))
    fabric.backward(model(**BATCH).loss)
    fabric.backward(other(**BATCH).loss)
    return callbacks[0].told(), callbacks[1].told(), order


def _through_the_trainer(ctx: Context) -> Any:
    order: list[str] = []
    first, second = TrainerCount(order, "first"), TrainerCount(order, "second")
    module, data = LanguageModel(), Data(2)
    trainer = make_trainer(ctx, 1, 2, callbacks=[first, second])
    trainer.fit(module, datamodule=data)
    fitted = first.told()
    trainer.callbacks.remove(second)
    seen = len(second.steps)
    trainer.validate(module, datamodule=data, verbose=False)
    return fitted, first.told()[0], first.losses, order[:4], len(second.steps) - seen


def _other_devices(ctx: Context) -> Any:
    """Without a pipeline nothing is called."""
    fabric = make_fabric(ctx, 2, 1)
    callback = Count()
    fabric.strategy.add_pipeline_callback(callback)
    model = fabric.setup(tiny_model("llama"))
    fabric.backward(model(**BATCH).loss)
    return callback.told()


@cache
def results() -> dict[str, list[Any]]:
    return world(
        2,
        _through_the_strategy,
        _through_fabrics_callbacks,
        _through_the_trainer,
        _other_devices,
    )


def call(step: int, rank: int) -> list[tuple[int, str, int]]:
    """Return the work of a 1F1B step of two stages and microbatches, as they end."""
    row = {0: ["F0", "F1", "B0", "B1"], 1: ["F0", "B0", "F1", "B1"]}[rank]
    return [(step, text[0], int(text[1])) for text in row]


def test_the_strategy_adds_and_removes() -> None:
    for rank, told in enumerate(good(results()["through_the_strategy"])):
        assert told == [[(0, True, (rank,))], call(0, rank)]


def test_fabrics_callbacks_are_found() -> None:
    for rank, (first, second, order) in enumerate(good(results()["through_fabrics_callbacks"])):
        assert first == [[(0, True, (rank,)), (1, True, (rank,))], call(0, rank) + call(1, rank)]
        assert second == first
        assert order == ["first", "second"] * 2


def test_the_trainers_callbacks_are_found_and_let_go() -> None:
    for rank, outcome in enumerate(good(results()["through_the_trainer"])):
        fitted, steps, losses, order, unwanted = outcome
        training = [(step, True, (rank,)) for step in (0, 1)]
        evaluations = [(step, False, (rank,)) for step in (2, 3)]
        assert fitted[0] == training + evaluations
        work = [(step, "F", mb) for step in (2, 3) for mb in (0, 1)]
        assert fitted[1] == call(0, rank) + call(1, rank) + work
        # The validation that followed.
        assert steps == fitted[0] + [(step, False, (rank,)) for step in (4, 5)]
        assert losses == 2
        assert order == ["first", "second"] * 2
        assert unwanted == 0


def test_without_a_pipeline_nothing_is_called() -> None:
    assert good(results()["other_devices"]) == [[[], []]] * 2


def test_one_class_can_be_a_callback_of_both_kinds() -> None:
    ours = {name for name in dir(PipelineCallback) if not name.startswith("_")}
    assert not ours & {name for name in dir(Callback) if not name.startswith("_")}


@pytest.mark.parametrize("strategy", [Goose3DFabricStrategy, Goose3DStrategy])
def test_what_is_no_callback_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="is no PipelineCallback"):
        strategy(pp=2).add_pipeline_callback(object())
    with pytest.raises(ConfigError, match="Count is not registered"):
        strategy(pp=2).remove_pipeline_callback(Count())


class Buggy(PipelineCallback):
    def before_backward(self, event: PipelineEvent) -> None:
        if event.rank == 1 and event.step == 2 and event.microbatch == 1:
            raise ArithmeticError("a bug in a callback")


def _a_callback_raises(ctx: Context) -> None:
    fabric = make_fabric(ctx, 1, 2, first_step_timeout_s=20.0, step_timeout_s=10.0)
    fabric.strategy.add_pipeline_callback(Buggy())
    model = fabric.setup(tiny_model("llama"))
    for _ in range(10**6):
        fabric.backward(model(**BATCH).loss)
        model.zero_grad()


def test_a_callback_that_raises_ends_all_ranks_as_the_first_cause() -> None:
    ends = run_ranks(_a_callback_raises, 2, isolated=True, expect_death=(0, 1))
    for end in ends:
        assert isinstance(end, Death)
        assert "CallbackError: callback Buggy.before_backward(PipelineEvent(" in end.output
        assert "ArithmeticError: a bug in a callback" in end.output
        assert "microbatch=1, stage=1, rank=1, schedule='1F1B', step=2, kind='B'" in end.output
    assert abs(ends[0].after_s - ends[1].after_s) < 10.0
    assert "rank 1 (pp 1, dp 0, tp 0)" in ends[0].output


def _fabrics_report(ctx: Context) -> Any:
    fabric = make_fabric(ctx, 1, 2)
    early = attempt(fabric.strategy.partition_report)
    bare = tiny_model("llama")
    model = fabric.setup(bare)
    reports = [
        fabric.strategy.partition_report(),
        fabric.strategy.partition_report(model),
        fabric.strategy.partition_report(bare),
    ]
    assert reports[0] is reports[1] is reports[2]
    other = attempt(lambda: fabric.strategy.partition_report(tiny_model("llama")))
    return str(reports[0]), reports[0].imbalance, early, other


def _trainers_report(ctx: Context) -> Any:
    trainer = make_trainer(ctx, 1, 2)
    trainer.fit(LanguageModel(), datamodule=Data(2))
    return str(trainer.strategy.partition_report())


def _report_of_no_pipeline(ctx: Context) -> Any:
    fabric = make_fabric(ctx, 2, 1)
    fabric.setup(tiny_model("llama"))
    return attempt(fabric.strategy.partition_report)


def test_the_partition_is_reported_at_both_doors() -> None:
    runs = world(2, _fabrics_report, _trainers_report, _report_of_no_pipeline)
    for text, imbalance, early, other in good(runs["fabrics_report"]):
        assert "schedule='1F1B' with 2 stages on 2 ranks, partition='balanced'" in text
        assert 1 <= imbalance < 1.5
        for refused in (early, other):
            assert "no module of this strategy is cut in depth (pp=2)" in str(refused)
    assert "2 stages on 2 ranks" in good(runs["trainers_report"])[0]
    for refused in runs["report_of_no_pipeline"]:
        assert "(pp=1); set the module up first, with pp > 1" in str(refused)
