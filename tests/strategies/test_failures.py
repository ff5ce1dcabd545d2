"""A rank that fails, is killed or is stopped ends all others soon, and the first cause is shown."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from goose_strategy import PipelineCallback, PipelineEvent
from tests.harness.models import Batch, batches, tiny_model
from tests.harness.worker import Context
from tests.harness.world import Death, run_ranks
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.ranks import make_fabric

QUICK = 10.0


SCHEDULES = ["1F1B", "ZBVZeroBubble"]
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def train(ctx: Context, before: Callable[[Any, int], None], schedule: str, **settings: Any) -> None:
    """Train for ever at pp2, in Fabric's loop."""
    limits = {"first_step_timeout_s": 20.0, "step_timeout_s": 3.0}
    fabric = make_fabric(ctx, 1, 2, schedule=schedule, **limits, **settings)
    model = tiny_model("llama")
    model = fabric.setup(model)
    batch = batches(1)[0]
    for step in range(10**6):
        before(model, step)
        fabric.backward(model(**batch).loss)
        model.zero_grad()


def _a_layer_raises(ctx: Context, schedule: str) -> None:
    def before(model: Any, step: int) -> None:
        if step == 2 and ctx.rank == 1:
            calls = []

            def broken(_module: Any, _args: Any) -> None:
                calls.append(1)
                if len(calls) == 2:
                    raise ArithmeticError("a bug in layer 2")

            model.module.model.layers[2].register_forward_pre_hook(broken)

    train(ctx, before, schedule)


def _a_rank_is_killed(ctx: Context, schedule: str) -> None:
    def before(_model: Any, step: int) -> None:
        if step == 2 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(ctx, before, schedule)


def _a_rank_is_stopped(ctx: Context, schedule: str) -> None:
    def before(_model: Any, step: int) -> None:
        if step == 2 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    train(ctx, before, schedule)


class Broken(PipelineCallback):
    def before_backward(self, event: PipelineEvent) -> None:
        if event.step == 2 and event.rank == 1 and event.microbatch == 1:
            raise ArithmeticError("a bug in a callback")


def _a_callback_raises(ctx: Context, schedule: str) -> None:
    def before(model: Any, step: int) -> None:
        if step == 2:
            model._strategy.add_pipeline_callback(Broken())

    train(ctx, before, schedule)


def _a_message_has_a_wrong_shape(ctx: Context, schedule: str) -> None:
    def before(model: Any, step: int) -> None:
        if step == 2 and ctx.rank == 0:
            # The last layer before a message.
            layer = model.module.model.layers[1 if schedule == "1F1B" else 0]
            layer.register_forward_hook(lambda _module, _args, hidden: hidden[:, :-1])

    train(ctx, before, schedule)


def _ranks_cut_batches_differently(ctx: Context, schedule: str) -> None:
    train(ctx, lambda _model, _step: None, schedule, microbatches=4 - 2 * ctx.rank)


def _ranks_have_other_numbers_of_microbatches(ctx: Context, schedule: str) -> None:
    fabric = make_fabric(ctx, 1, 2, schedule=schedule, step_timeout_s=3.0)
    model = fabric.setup(tiny_model("llama"))
    parts = batches(4, batch_size=2)[: 4 - ctx.rank]
    fabric.backward(model(parts).loss)


class Buggy(LanguageModel):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            raise ArithmeticError("a bug in training_step")
        return super().training_step(batch, batch_idx)


def _a_training_step_raises(ctx: Context) -> None:
    make_trainer(ctx, 1, 2).fit(Buggy(), datamodule=Data())


def both_end(scenario: Callable[..., None], within_s: float, *args: Any) -> list[Death]:
    ends = run_ranks(scenario, 2, *args, isolated=True, expect_death=(0, 1))
    assert all(isinstance(end, Death) for end in ends)
    first, last = sorted(end.after_s for end in ends)
    assert last - first < within_s
    return ends


@each_schedule
def test_an_error_in_the_schedule_names_rank_stage_and_microbatch(schedule: str) -> None:
    for end in both_end(_a_layer_raises, QUICK, schedule):
        assert "ArithmeticError: a bug in layer 2" in end.output
        assert "rank 1" in end.output
        # Layer 2 is on the upper stage of a V's second rank.
        assert f"stage {1 if schedule == '1F1B' else 2}" in end.output
        assert "microbatch 1" in end.output


def test_an_error_in_a_callback_names_it() -> None:
    for end in both_end(_a_callback_raises, QUICK, "ZBVZeroBubble"):
        assert "callback Broken.before_backward(" in end.output
        assert "ArithmeticError: a bug in a callback" in end.output
        assert "rank 1" in end.output


@each_schedule
def test_a_message_of_another_shape_is_refused_before_it_is_sent(schedule: str) -> None:
    for end in both_end(_a_message_has_a_wrong_shape, QUICK, schedule):
        assert "when it was first sent to rank 1" in end.output
        assert "(2, 11, 32)" in end.output
        assert "rank 0" in end.output
        assert "stage 0" in end.output


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (_ranks_cut_batches_differently, "expects the message"),
        (_ranks_have_other_numbers_of_microbatches, "shard the data by the data parallel"),
    ],
)
def test_ranks_with_other_microbatches_end(scenario: Callable[..., None], message: str) -> None:
    for end in both_end(scenario, QUICK, "ZBVZeroBubble"):
        assert message in end.output


def test_an_error_of_one_rank_in_user_code_ends_all() -> None:
    other, failed = both_end(_a_training_step_raises, QUICK)
    for end in (other, failed):
        assert "ArithmeticError: a bug in training_step" in end.output
    assert "rank 1 (pp 1, dp 0, tp 0)" in other.output


def test_a_killed_rank_ends_all() -> None:
    other, killed = both_end(_a_rank_is_killed, QUICK, "ZBVZeroBubble")
    assert killed.exit_code == -signal.SIGKILL
    assert "PeerError" in other.output or "goose-strategy:" in other.output


@pytest.mark.timeout(90)
def test_a_stopped_rank_ends_all_others_at_the_deadline() -> None:
    other, stopped = run_ranks(
        _a_rank_is_stopped,
        2,
        "ZBVZeroBubble",
        isolated=True,
        expect_death=(0,),
        expect_stopped=(1,),
    )
    assert isinstance(other, Death)
    assert isinstance(stopped, Death)
    assert "deadline of 3 s expired" in other.output
    assert "rank 1: " in other.output
