"""Collectives through the host's memory: what the plain ones promise, and every order of copies."""

from datetime import timedelta

import pytest
import torch

from goose_strategy.comm.collectives import (
    DONE,
    all_gather_flat,
    all_gather_uneven,
    all_reduce,
    broadcast,
    exchange_flat,
    reduce_scatter_flat,
)
from goose_strategy.comm.staged import lane_of
from goose_strategy.mesh.lane import LANES
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from tests.comm import test_collectives as plain
from tests.comm.plants import PLANTS
from tests.harness.streams import FakeLane, staged
from tests.harness.world import run_ranks

PACES = ["late", "early"]
TRANSPORTS = [pytest.param(True, id="memory"), pytest.param(False, id="gloo")]

ALL = ("all_reduce", "reduce_scatter", "all_gather", "exchange", "broadcast")


def _through_the_host(ctx, body, pace, shared_memory, *rest):
    """Run a test of the plain collectives with the CPU as the device."""
    with staged(FakeLane(pace)) as lane:
        result = body(ctx, shared_memory, *rest)
    assert lane.copies > 0
    assert not LANES
    return result


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("pace", PACES)
def test_all_reduce_gives_the_same_bits_on_all_ranks(pace, shared_memory):
    body, numels = plain._reductions, plain.NUMELS[:4]
    every = run_ranks(_through_the_host, 4, body, pace, shared_memory, numels, plain.DTYPES)
    assert all(bits == every[0] for bits in every)
    if shared_memory:
        # And those of ranks without a device: parity of the CPU holds for the card's transport.
        assert run_ranks(body, 4, True, numels, plain.DTYPES) == every


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("pace", PACES)
def test_reduce_scatter_and_all_gather(pace, shared_memory, async_op):
    run_ranks(_through_the_host, 2, plain._flat, pace, shared_memory, async_op)


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("pace", PACES)
def test_asynchronous_operations_run_in_the_order_of_their_launches(pace, shared_memory):
    expected = ([1.0] * 8, [21.0] * 4, [101.0] * 8, [2.0, 2.0])
    found = run_ranks(_through_the_host, 2, plain._order, pace, shared_memory)
    assert found == [expected, expected]


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("pace", PACES)
def test_copies_and_objects(pace, shared_memory):
    expected = [(rank, 10 ** (1 + rank)) for rank in [*range(4), 1]]
    assert run_ranks(_through_the_host, 4, plain._copies, pace, shared_memory) == [expected] * 4


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("pace", PACES)
def test_an_exchange_hands_every_rank_its_slices(pace, shared_memory):
    run_ranks(_through_the_host, 2, plain._exchanges, pace, shared_memory)


def _operations(rank, round_number):
    """Return for each operation: what this rank computes, the launch, and what comes of it."""
    mine, both = [float(10 * r + round_number) for r in (rank, 0)], 10.0 + 2 * round_number
    theirs = float(10 * (1 - rank) + round_number)
    first, second = (mine[0], theirs) if rank == 0 else (theirs, mine[0])
    half = 512
    return {
        "all_reduce": (
            lambda x, _out, group: all_reduce(x, group, async_op=True),
            lambda x, _out: x,
            torch.full((2 * half,), both),
        ),
        "reduce_scatter": (
            lambda x, _out, group: reduce_scatter_flat(x, group, async_op=True),
            lambda x, _out: x[rank * half : (rank + 1) * half],
            torch.full((half,), both),
        ),
        "all_gather": (
            lambda x, out, group: all_gather_flat(out, x[:half], group, async_op=True),
            lambda _x, out: out,
            torch.tensor([first, second]).repeat_interleave(half),
        ),
        "exchange": (
            lambda x, out, group: exchange_flat(out, x, group, async_op=True),
            lambda _x, out: out,
            torch.tensor([first, second]).repeat_interleave(half),
        ),
        "broadcast": (
            lambda x, _out, group: broadcast(x, source=1, group=group, async_op=True),
            lambda x, _out: x,
            torch.full((2 * half,), 10.0 + round_number),
        ),
    }


def _hazards(ctx, pace, shared_memory, plant):
    """Compute late, read the old values late, and return which operations went wrong."""
    lane = FakeLane(pace, computing="late")
    with staged(lane):
        mesh = ParallelMesh.create(
            MeshLayout.from_world(2, tp=2, pp=1),
            device=torch.device("cpu"),
            timeout=timedelta(seconds=30),
            shared_memory=shared_memory,
        )
    wrong = set()
    try:
        with PLANTS[plant](lane):
            checks, kept = [], []
            # One operation after the other: some wait for each other's copies by themselves.
            for name in ALL:
                for number in range(6):
                    launch, place, expected = _operations(ctx.rank, number)[name]
                    x, out = torch.full((1024,), -1.0), torch.full((1024,), -2.0)
                    old, new = torch.zeros(1024), torch.zeros_like(expected)
                    value = float(10 * ctx.rank + number)
                    lane.compute(lambda x=x, value=value: x.fill_(value))
                    lane.compute(lambda old=old, out=out: old.copy_(out))
                    kept.append((x, out))
                    pending = launch(x, out, mesh.tp)
                    assert pending is not DONE
                    pending.wait()
                    pending.wait()
                    found = place(x, out)
                    lane.compute(lambda new=new, found=found: new.copy_(found))
                    checks += [(name, new, expected), (name, old, torch.full((1024,), -2.0))]
            lane.finish()
        wrong = {name for name, found, expected in checks if not torch.equal(found, expected)}
    finally:
        mesh.close()
    return wrong


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("pace", PACES)
def test_no_order_of_copies_spoils_a_result(pace, shared_memory):
    assert run_ranks(_hazards, 2, pace, shared_memory, "nothing") == [set(), set()]


@pytest.mark.parametrize(
    ("plant", "pace", "spoilt"),
    [
        ("the copy down does not wait for the computation", "late", ALL),
        ("the copy down does not wait for the computation", "early", ALL),
        ("the host does not wait for the copy down", "late", ALL),
        ("the copy up does not wait for the computation", "early", {"broadcast"}),
        ("the computation does not wait for the copy up", "late", ALL),
        ("memory is used again at once", "late", {"broadcast", "exchange"}),
    ],
)
@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_every_wait_is_needed(plant, pace, spoilt, shared_memory):
    found = run_ranks(_hazards, 2, pace, shared_memory, plant)
    assert found[0] | found[1] == set(spoilt)


def _uneven(ctx):
    with staged(FakeLane("late")):
        mesh = ParallelMesh.create(
            MeshLayout.from_world(2, tp=2, pp=1),
            device=torch.device("cpu"),
            timeout=timedelta(seconds=30),
        )
    try:
        assert lane_of(mesh.tp, torch.zeros(1)) is LANES[mesh.tp]
        assert lane_of(mesh.control, torch.zeros(1)) is None
        shard = torch.full((1 + ctx.rank, 2), float(ctx.rank), requires_grad=True)
        with torch.inference_mode():
            inside = all_gather_uneven(shard, mesh.tp, dim=0, sizes=[1, 2])
        outside = all_gather_uneven(shard, mesh.tp, dim=0, sizes=[1, 2])
        return inside.tolist(), outside.tolist()
    finally:
        mesh.close()


def test_memory_is_shared_by_inference_mode_and_training():
    expected = [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    assert run_ranks(_uneven, 2) == [(expected, expected)] * 2
