"""Rounds: replicas that use different parameters, parameters that nobody uses, frozen ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from goose_strategy.comm.recorder import Recorder, recording
from goose_strategy.grads.buffer import GradState
from tests.data_parallel import toy
from tests.data_parallel.test_reducer import ordinary, reference, run_sharded
from tests.data_parallel.toy import STEPS, Plain, Sharded, Trace, adamw, assert_same, batch
from tests.harness.worker import Context
from tests.harness.world import run_ranks


def _routed(driver: Plain, world_size: int) -> None:
    """Each replica uses one branch, in some steps all the same one; one process uses them all."""
    for step in range(STEPS):
        x = batch(step)
        used = [(step + rank) % 2 if step < 3 else step % 2 for rank in range(world_size)]
        if isinstance(driver, Sharded):
            rank = driver.mesh.dp_rank
            loss = driver.forward(driver.rows(x), branch=used[rank]).square().mean()
        else:
            parts = zip(x.chunk(world_size), used, strict=True)
            losses = [driver.forward(part, branch=b).square().mean() for part, b in parts]
            loss = torch.stack(losses).mean()
        driver.backward(loss)
        driver.record_gradients()
        driver.clip(0.05)
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def _run_routed(ctx: Context, bucket_numel: int) -> Trace:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size), bucket_numel=bucket_numel)
    _routed(driver, ctx.world_size)
    return driver.finish()


@pytest.mark.parametrize("bucket_numel", [300, 10**9])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_unused_parameters_are_left_alone_unless_a_replica_used_them(
    world_size: int, bucket_numel: int
) -> None:
    driver = Plain(toy.toy(), adamw)
    _routed(driver, world_size)
    expected = driver.finish()
    for trace in run_ranks(_run_routed, world_size, bucket_numel):
        assert_same(trace, expected, rel=1e-11)


def _nothing_on_rank_0(ctx: Context) -> tuple[list[str], int]:
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    x = torch.ones(2, toy.WIDTH, dtype=torch.float64)
    loss = driver.forward(x).square().mean() if ctx.rank else torch.ones((), requires_grad=True)
    driver.backward(loss)
    full = driver.reducer.full_gradients()
    driver.close()
    return sorted(full), len([1 for value in full.values() if value.abs().sum() > 0])


def test_a_rank_whose_loss_used_nothing_takes_part() -> None:
    names = sorted(n for n, _ in toy.toy().named_parameters() if not n.startswith("branch.1"))
    assert run_ranks(_nothing_on_rank_0, 2) == [(names, len(names))] * 2


def _frozen(model: nn.Module) -> list[torch.optim.Optimizer]:
    model.outer.requires_grad_(False)
    model.norm.weight.requires_grad_(False)
    return adamw(model)


def _run_frozen(ctx: Context) -> tuple[Trace, int]:
    driver = Sharded(toy.toy(), _frozen, toy.make_mesh(ctx.world_size))
    held = sum(len(bucket.slots) for bucket in driver.reducer.buckets)
    ordinary(driver)
    return driver.finish(), held


def test_frozen_parameters_have_no_bucket() -> None:
    expected = reference(ordinary, _frozen)
    for trace, held in run_ranks(_run_frozen, 2):
        assert_same(trace, expected, rel=1e-11)
        assert held == len(expected.gradients[0]) + 2, "the unused branch is trainable, too"


def _toggled(driver: Plain) -> None:
    """Parameters are frozen for some steps, as ``toggle_optimizer`` does, and thawed again."""
    for step in range(STEPS):
        driver.model.inner.requires_grad_(step % 2 == 0)
        driver.backward(driver.forward(driver.rows(batch(step))).square().mean())
        driver.record_gradients()
        driver.optimizer.step()
        driver.optimizer.zero_grad()


@pytest.mark.parametrize("bucket_numel", [300, 10**9])
def test_parameters_may_be_frozen_for_a_while(bucket_numel: int) -> None:
    expected = reference(_toggled)
    for trace in run_ranks(run_sharded, 2, _toggled, adamw, {"bucket_numel": bucket_numel}):
        assert_same(trace, expected, rel=1e-11)


# -- what is launched ------------------------------------------------------------------------------


def _launches(ctx: Context) -> list[tuple[str, tuple[int, ...]]]:
    driver = Sharded(toy.toy(branches=4), adamw, toy.make_mesh(ctx.world_size), bucket_numel=300)
    with recording(Recorder()) as recorder:
        for _ in range(2):
            x = driver.rows(batch(0))
            driver.backward(driver.forward(x, branch=ctx.rank).square().mean())
            driver.optimizer.step()
            driver.optimizer.zero_grad()
    driver.close()
    return [(launch.op, launch.shape) for launch in recorder.launches]


def test_ranks_launch_the_same_whatever_they_use() -> None:
    first, *others = run_ranks(_launches, 4)
    assert len(first) > 20
    assert all(other == first for other in others)


def _started_early(ctx: Context) -> tuple[list[int], int]:
    """Buckets that were started when the first layer's gradient came, and their number."""
    driver = Sharded(toy.toy(branches=1), adamw, toy.make_mesh(ctx.world_size), bucket_numel=2000)
    started: list[int] = []
    buckets = driver.reducer.buckets

    def look(_: nn.Parameter) -> None:
        started[:] = [b.index for b in buckets if b.grads.state is GradState.REDUCING]

    driver.model.inner.bias.register_post_accumulate_grad_hook(look)
    driver.backward(driver.forward(driver.rows(batch(0))).square().mean())
    driver.close()
    return started, len(buckets)


def test_complete_buckets_start_within_the_backward_in_index_order() -> None:
    for started, buckets in run_ranks(_started_early, 2):
        assert 0 < len(started) < buckets
        assert started == list(range(len(started)))


def _reads(ctx: Context, branch: int) -> int:
    """How often a rank looks at who used what; on a device each look would stall the host."""
    driver = Sharded(toy.toy(), adamw, toy.make_mesh(ctx.world_size))
    rounds = driver.reducer._rounds
    seen: list[int] = []
    attach = rounds._attach_used
    rounds._attach_used = lambda *args: (seen.append(1), attach(*args))[1]
    for step in range(3):
        x = driver.rows(batch(step))
        loss = driver.forward(x, branch=0).square().mean()
        if branch == 1 or ctx.rank == 1:
            loss = loss + driver.forward(x, branch=1).square().mean()
        driver.backward(loss)
        # On another communicator: who reads the flags must not wait for who is there already.
        driver.clip(1.0)
        driver.optimizer.step()
        driver.optimizer.zero_grad()
    driver.close()
    return len(seen)


def test_only_a_rank_that_left_something_unused_reads_what_others_used() -> None:
    assert run_ranks(_reads, 2, 1) == [0, 0]
    assert run_ranks(_reads, 2, 0) == [3, 0]
