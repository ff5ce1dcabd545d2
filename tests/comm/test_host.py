"""Shared-memory collectives: what goes wrong is said, and equals what gloo's transport sums."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from goose_strategy.comm.collectives import all_reduce, barrier, reduce_scatter_flat
from goose_strategy.comm.host import HALVED, Deferred, all_reduce_host, exchange
from goose_strategy.errors import MeshError, PeerError
from goose_strategy.mesh.host import HALF_BYTES, PEERS, connect_host, disconnect_host
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from tests.harness.world import run_ranks


def _mesh(ctx, timeout_s=30.0):
    return ParallelMesh.create(
        MeshLayout.from_world(ctx.world_size, tp=ctx.world_size, pp=1),
        device=torch.device("cpu"),
        timeout=timedelta(seconds=timeout_s),
    )


def _caught(action, kind):
    try:
        action()
    except kind as err:
        return str(err)
    return "no error"


def _different(ctx):
    mesh = _mesh(ctx)
    try:
        one = torch.zeros(4 + ctx.rank)
        first = _caught(lambda: all_reduce(one, mesh.tp), MeshError)
        two = torch.zeros(4, dtype=torch.float64)
        run = (lambda: all_reduce(two, mesh.tp)) if ctx.rank else (lambda: barrier(mesh.tp))
        return first, _caught(run, MeshError)
    finally:
        mesh.close()


def test_different_operations_are_named_on_both_ranks():
    (zero, zero_kind), (one, one_kind) = run_ranks(_different, 2)
    assert zero.startswith(
        "rank 0 launched 'reduce sum' of 4 float32 on tp but rank 1 launched 'reduce sum' of 5 "
        "float32; all ranks of a group must launch the same operations in the same order."
    )
    assert "rank 1 launched 'reduce sum' of 5 float32 on tp but rank 0" in one
    assert "launched 'barrier' of 0 uint8 on tp but rank 1 launched 'reduce sum'" in zero_kind
    assert "of 4 float64 on tp but rank 0 launched 'barrier'" in one_kind


def _absent(ctx, leaves):
    mesh = _mesh(ctx, timeout_s=0.5)
    try:
        barrier(mesh.tp)
        if ctx.rank == 1:
            if not leaves:
                time.sleep(1.0)
            return "", 0.0
        begin = time.monotonic()
        text = _caught(lambda: all_reduce(torch.zeros(2), mesh.tp), PeerError)
        return text, time.monotonic() - begin
    finally:
        mesh.close()


def test_a_silent_neighbour_is_named_at_the_deadline():
    (text, seconds), _ = run_ranks(_absent, 2, False)
    assert text.startswith(
        "rank 0 waited in 'reduce sum' on tp for rank 1, which is silent for 0.5 s."
    )
    assert 0.4 < seconds < 1.5


def test_a_neighbour_that_left_is_named_at_once():
    (text, seconds), _ = run_ranks(_absent, 2, True)
    assert text.startswith("rank 0 waited in 'reduce sum' on tp for rank 1, which is gone")
    assert seconds < 0.45


def _deferred(ctx):
    mesh = _mesh(ctx)
    try:
        tensor = torch.full((4,), float(ctx.rank))
        pending = all_reduce(tensor, mesh.tp, async_op=True)
        early = tensor.tolist()
        assert isinstance(pending, Deferred)
        barrier(mesh.tp)
        ran = tensor.tolist()
        pending.wait()
        never = reduce_scatter_flat(tensor, mesh.tp, async_op=True)
    finally:
        mesh.close()
    return early, ran, tensor.tolist(), _caught(never.wait, MeshError)


def test_deferred_operations_run_with_the_next_one_at_the_latest():
    for rank, (early, ran, after, closed) in enumerate(run_ranks(_deferred, 2)):
        assert early == [rank] * 4
        assert ran == after == [1.0] * 4
        assert "the mesh was closed before an operation on tp" in closed


def _both_ways(ctx):
    """The same numbers through shared memory and through gloo's messages."""
    mesh = _mesh(ctx)
    try:
        results = []
        for dtype in (torch.float32, *HALVED):
            generator = torch.Generator().manual_seed(ctx.rank)
            flat = torch.randn(4 * 1000, generator=generator).to(dtype)
            here, there, whole = flat.clone(), flat.clone(), flat.clone()
            reduce_scatter_flat(here, mesh.tp)
            reduce_scatter_flat(there, dist.group.WORLD if mesh.world not in PEERS else _plain())
            all_reduce(whole, mesh.tp)
            own = slice(1000 * ctx.rank, 1000 * ctx.rank + 1000)
            results.append(torch.equal(here[own], there[own]))
            results.append(torch.equal(here[own], whole[own]))
        return results
    finally:
        mesh.close()


def _plain():
    return dist.new_group([0, 1, 2, 3])


def test_both_transports_sum_in_rank_order():
    assert run_ranks(_both_ways, 4) == [[True] * 6] * 4


def _views(ctx):
    """Tensors in the middle of others, of several dimensions, with gradients."""
    mesh = _mesh(ctx)
    try:
        base = torch.zeros(6, 4)
        base[2:4] = ctx.rank + 1
        all_reduce(base[2:4], mesh.tp)
        leaf = torch.ones(3, requires_grad=True)
        all_reduce(leaf, mesh.tp)
        return base.sum().item(), leaf.tolist()
    finally:
        mesh.close()


def test_views_and_leaves_are_reduced_in_place():
    assert run_ranks(_views, 2) == [(24.0, [2.0] * 3)] * 2


def test_a_half_holds_whole_elements_of_every_type():
    assert HALF_BYTES % 64 == 0


def _stale(ctx):
    """A fast rank must not overwrite what a slow one still reads."""
    group = dist.group.WORLD
    connected = connect_host({"w": group}, control=group, timeout=timedelta(seconds=20))
    peers = PEERS[group]
    try:
        for step in range(300):
            tensor = torch.full((2048,), float(step * (ctx.rank + 1)))
            if step % 7 == ctx.rank:
                time.sleep(0.001)
            all_reduce_host(peers, tensor, "sum")
            assert torch.equal(tensor, torch.full((2048,), step * 10.0)), step
        exchange(peers, "done", torch.uint8, 0)
    finally:
        disconnect_host(connected)


def test_nothing_is_overwritten_before_it_was_read():
    run_ranks(_stale, 4)
