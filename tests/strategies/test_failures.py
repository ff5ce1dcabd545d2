"""A rank that fails, is killed or is stopped ends all others soon, and the first cause is shown."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.harness.models import Batch, batches, tiny_model
from tests.harness.worker import Context
from tests.harness.world import Death, run_ranks
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.ranks import make_fabric

QUICK = 10.0


def train(ctx: Context, before: Callable[[Any, int], None]) -> None:
    """Train for ever at pp2, in Fabric's loop."""
    fabric = make_fabric(ctx, 1, 2, first_step_timeout_s=20.0, step_timeout_s=3.0)
    model = tiny_model("llama")
    model = fabric.setup(model)
    batch = batches(1)[0]
    for step in range(10**6):
        before(model, step)
        fabric.backward(model(**batch).loss)
        model.zero_grad()


def _a_layer_raises(ctx: Context) -> None:
    def before(model: Any, step: int) -> None:
        if step == 2 and ctx.rank == 1:
            calls = []

            def broken(_module: Any, _args: Any) -> None:
                calls.append(1)
                if len(calls) == 2:
                    raise ArithmeticError("a bug in layer 3")

            model.module.model.layers[3].register_forward_pre_hook(broken)

    train(ctx, before)


def _a_rank_is_killed(ctx: Context) -> None:
    def before(_model: Any, step: int) -> None:
        if step == 2 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    train(ctx, before)


def _a_rank_is_stopped(ctx: Context) -> None:
    def before(_model: Any, step: int) -> None:
        if step == 2 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    train(ctx, before)


class Buggy(LanguageModel):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            raise ArithmeticError("a bug in training_step")
        return super().training_step(batch, batch_idx)


def _a_training_step_raises(ctx: Context) -> None:
    make_trainer(ctx, 1, 2).fit(Buggy(), datamodule=Data())


def both_end(scenario: Callable[[Context], None], within_s: float) -> list[Death]:
    ends = run_ranks(scenario, 2, isolated=True, expect_death=(0, 1))
    assert all(isinstance(end, Death) for end in ends)
    first, last = sorted(end.after_s for end in ends)
    assert last - first < within_s
    return ends


def test_an_error_in_the_schedule_names_rank_stage_and_microbatch() -> None:
    for end in both_end(_a_layer_raises, QUICK):
        assert "ArithmeticError: a bug in layer 3" in end.output
        assert "rank 1" in end.output
        assert "stage 1" in end.output
        assert "microbatch 1" in end.output


def test_an_error_of_one_rank_in_user_code_ends_all() -> None:
    other, failed = both_end(_a_training_step_raises, QUICK)
    for end in (other, failed):
        assert "ArithmeticError: a bug in training_step" in end.output
    assert "rank 1 (pp 1, dp 0, tp 0)" in other.output


def test_a_killed_rank_ends_all() -> None:
    other, killed = both_end(_a_rank_is_killed, QUICK)
    assert killed.exit_code == -signal.SIGKILL
    assert "PeerError" in other.output or "goose-strategy:" in other.output


@pytest.mark.timeout(90)
def test_a_stopped_rank_ends_all_others_at_the_deadline() -> None:
    other, stopped = run_ranks(
        _a_rank_is_stopped, 2, isolated=True, expect_death=(0,), expect_stopped=(1,)
    )
    assert isinstance(other, Death)
    assert isinstance(stopped, Death)
    assert "deadline of 3 s expired" in other.output
    assert "rank 1: " in other.output
