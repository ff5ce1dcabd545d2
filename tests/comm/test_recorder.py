"""The launch recorder: silent unless installed, and it sees what ranks do differently."""

from datetime import timedelta

import pytest
import torch

from goose_strategy.comm.collectives import (
    all_gather_flat,
    all_reduce,
    broadcast,
    recording,
    reduce_scatter_flat,
)
from goose_strategy.comm.p2p import StageLink
from goose_strategy.comm.recorder import ACTIVE, Launch, Recorder, mismatches
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from tests.harness.world import run_ranks

F32 = torch.float32


def _record(ctx, shared_memory):
    mesh = ParallelMesh.create(
        MeshLayout.from_world(ctx.world_size, tp=1, pp=2),
        device=torch.device("cpu"),
        timeout=timedelta(seconds=30),
        shared_memory=shared_memory,
    )
    recorder, own = Recorder(), Recorder()
    try:
        flat = torch.ones(4)
        all_reduce(flat, mesh.world)
        with recording(recorder):
            all_reduce(flat, mesh.world, op="max")
            reduce_scatter_flat(flat, mesh.world, async_op=True).wait()
            all_gather_flat(flat, flat[2 * ctx.rank : 2 * ctx.rank + 2], mesh.world)
            broadcast(flat, source=1, group=mesh.world)
            link = StageLink(1 - ctx.rank, mesh.pp_forward, own)
            if ctx.rank == 0:
                link.send([flat, flat[:1]]).wait()
            else:
                link.post_receive([(4,), (1,)], [F32, F32]).wait()
        all_reduce(flat, mesh.world)
        link.flush()
    finally:
        mesh.close()
    return recorder, own, len(ACTIVE)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_ranks_that_do_the_same_record_the_same(shared_memory):
    (zero, zero_own, left), (one, one_own, _) = run_ranks(_record, 2, shared_memory)
    assert left == 0
    world, pp = zero.by_group()
    assert pp == "goose_pp_forward[0, 1]"
    assert zero.by_group()[world] == one.by_group()[world]
    assert [launch[1:] for launch in zero.by_group()[world]] == [
        ("all_reduce max", None, (4,), F32),
        ("reduce_scatter", None, (4,), F32),
        ("all_gather", None, (2,), F32),
        ("broadcast", 1, (4,), F32),
    ]
    assert zero.by_group()[pp] == [
        Launch(pp, "send", 1, (4,), F32),
        Launch(pp, "send", 1, (1,), F32),
    ]
    assert [launch[1:4] for launch in one_own.launches] == [
        ("receive", 0, (4,)),
        ("receive", 0, (1,)),
    ]
    assert zero_own.launches == zero.by_group()[pp]
    assert zero.hash(world) == one.hash(world)
    assert zero.hash() != one.hash()
    assert mismatches({0: zero, 1: one}) == []


def _recorder(*launches):
    recorder = Recorder()
    recorder.launches.extend(Launch(*launch, F32) for launch in launches)
    return recorder


def test_another_order_on_one_rank_is_seen():
    a, b = ("g[0, 1]", "all_reduce sum", None, (4,)), ("g[0, 1]", "broadcast", 0, (4,))
    (text,) = mismatches({0: _recorder(a, a, b), 1: _recorder(a, b, a)})
    assert text.startswith("g[0, 1]: launch 1 is [Launch(group='g[0, 1]', op='all_reduce sum'")
    assert "on rank 0 but [Launch(group='g[0, 1]', op='broadcast'" in text


def test_a_launch_that_one_rank_lacks_is_seen():
    a = ("g[2, 5]", "all_reduce sum", None, (4,))
    (text,) = mismatches({2: _recorder(a), 5: _recorder()})
    assert "launch 0" in text
    assert "but [] on rank 5" in text


def test_messages_are_matched_by_pair_and_direction():
    sent = ("pp[0, 1, 2]", "send", 1, (4,))
    received = ("pp[0, 1, 2]", "receive", 0, (4,))
    assert mismatches({0: _recorder(sent, sent), 1: _recorder(received, received)}) == []
    (text,) = mismatches({0: _recorder(sent), 1: _recorder((*received[:3], (5,)))})
    assert text.startswith("pp[0, 1, 2]: rank 0 sent [((4,), torch.float32)] to rank 1")
    (text,) = mismatches({0: _recorder(sent), 1: _recorder()})
    assert text.endswith("to rank 1, which received [].")


def test_recorders_nest_and_leave():
    outer, inner = Recorder(), Recorder()
    with recording(outer) as same, recording(inner):
        assert same is outer
        assert [outer, inner] == ACTIVE
    assert not ACTIVE
