"""Collectives over both CPU transports, against sums and concatenations of what the ranks hold."""

from datetime import timedelta

import pytest
import torch

from goose_strategy.comm.collectives import (
    DONE,
    all_gather_flat,
    all_gather_objects,
    all_gather_uneven,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object,
    exchange_flat,
    reduce_scatter_flat,
)
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from tests.harness.world import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]
NUMELS = [1, 12, 4096, 300_012, 1_600_008]  # the last two are several pieces in some way
TRANSPORTS = [pytest.param(True, id="memory"), pytest.param(False, id="gloo")]


def _values(rank, numel, dtype):
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-1000, 1000, (numel,), generator=generator, dtype=dtype)


def _mesh(ctx, shared_memory):
    return ParallelMesh.create(
        MeshLayout.from_world(ctx.world_size, tp=ctx.world_size, pp=1),
        device=torch.device("cpu"),
        timeout=timedelta(seconds=30),
        shared_memory=shared_memory,
    )


def _in_rank_order(parts):
    """Sum as one rank would: in rank order, 16-bit types in fp32."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(parts[0].dtype)


def _reductions(ctx, shared_memory, numels, dtypes):
    mesh = _mesh(ctx, shared_memory)
    bits = []
    try:
        for numel in numels:
            for dtype in dtypes:
                parts = [_values(rank, numel, dtype) for rank in range(ctx.world_size)]
                whole = parts[ctx.rank].clone()
                assert all_reduce(whole, mesh.tp) is DONE
                expected = _in_rank_order(parts)
                if shared_memory:
                    assert torch.equal(whole, expected)
                else:
                    tolerance = 64 * torch.finfo(dtype).eps if dtype.is_floating_point else 0
                    torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance)
                bits.append(hash(whole.view(torch.uint8).numpy().tobytes()))
                for op, fold in (("max", torch.maximum), ("min", torch.minimum)):
                    extreme = parts[ctx.rank].clone()
                    all_reduce(extreme, mesh.tp, op=op)
                    rest = parts[0]
                    for part in parts[1:]:
                        rest = fold(rest, part)
                    assert torch.equal(extreme, rest)
    finally:
        mesh.close()
    return bits


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 4])
def test_all_reduce_gives_the_same_bits_on_all_ranks(world, shared_memory):
    every = run_ranks(_reductions, world, shared_memory, NUMELS[:4], DTYPES)
    assert all(bits == every[0] for bits in every)


@pytest.mark.parametrize("world", [2, 3, 4, 6])
def test_all_reduce_of_many_pieces(world):
    every = run_ranks(_reductions, world, True, NUMELS[3:], [torch.float32, torch.bfloat16])
    assert all(bits == every[0] for bits in every)


def _flat(ctx, shared_memory, async_op):
    mesh = _mesh(ctx, shared_memory)
    world, rank = ctx.world_size, ctx.rank
    try:
        for numel in NUMELS[1:]:
            for dtype in DTYPES:
                width = numel // world
                parts = [_values(r, numel, dtype) for r in range(world)]
                own = slice(rank * width, (rank + 1) * width)
                flat = parts[rank].clone()
                reduce_scatter_flat(flat, mesh.tp, async_op=async_op).wait()
                assert torch.equal(flat[own], _in_rank_order(parts)[own]), (numel, dtype)

                wanted = torch.cat([part[:width] for part in parts])
                output = torch.zeros_like(wanted)
                all_gather_flat(output, parts[rank][:width], mesh.tp, async_op=async_op).wait()
                assert torch.equal(output, wanted)
                output.zero_()
                output[own] = parts[rank][:width]
                all_gather_flat(output, output[own], mesh.tp, async_op=async_op).wait()
                assert torch.equal(output, wanted)
    finally:
        mesh.close()


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 4])
def test_reduce_scatter_and_all_gather(world, shared_memory, async_op):
    run_ranks(_flat, world, shared_memory, async_op)


def _order(ctx, shared_memory):
    """Launch without waiting, and wait in another order on each rank."""
    mesh = _mesh(ctx, shared_memory)
    one = torch.full((8,), float(ctx.rank))
    two = torch.full((8,), float(ctx.rank + 10))
    three = torch.full((8,), float(ctx.rank + 100))
    try:
        pending = [
            all_reduce(one, mesh.tp, async_op=True),
            reduce_scatter_flat(two, mesh.tp, async_op=True),
            broadcast(three, source=1, group=mesh.tp, async_op=True),
        ]
        last = torch.ones(2)
        all_reduce(last, mesh.tp)  # behind the others on every rank
        for index in (0, 1, 2) if ctx.rank else (2, 0, 1):
            pending[index].wait()
            pending[index].wait()
        own = slice(4 * ctx.rank, 4 * ctx.rank + 4)
        return one.tolist(), two[own].tolist(), three.tolist(), last.tolist()
    finally:
        mesh.close()


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
def test_asynchronous_operations_run_in_the_order_of_their_launches(shared_memory):
    expected = ([1.0] * 8, [21.0] * 4, [101.0] * 8, [2.0, 2.0])
    assert run_ranks(_order, 2, shared_memory) == [expected, expected]


def _copies(ctx, shared_memory):
    mesh = _mesh(ctx, shared_memory)
    sizes = [3, 0, 5, 1][: ctx.world_size]
    try:
        shard = torch.full((2, sizes[ctx.rank], 4), float(ctx.rank), dtype=torch.bfloat16)
        whole = all_gather_uneven(shard, mesh.tp, dim=1, sizes=sizes)
        expected = torch.cat(
            [torch.full((2, n, 4), float(r), dtype=torch.bfloat16) for r, n in enumerate(sizes)], 1
        )
        assert torch.equal(whole, expected)
        assert whole.is_contiguous()
        for numel in (0, 1, 600_001):
            tensor = _values(ctx.rank, numel, torch.float64)
            broadcast(tensor, source=ctx.world_size - 1, group=mesh.tp)
            assert torch.equal(tensor, _values(ctx.world_size - 1, numel, torch.float64))
        barrier(mesh.tp)
        told = {"rank": ctx.rank, "text": "x" * 10 ** (1 + ctx.rank)}
        every = all_gather_objects(told, mesh.control)
        one = broadcast_object(told, source=1, group=mesh.control)
    finally:
        mesh.close()
    return [(obj["rank"], len(obj["text"])) for obj in [*every, one]]


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("world", [2, 4])
def test_copies_and_objects(world, shared_memory):
    expected = [(rank, 10 ** (1 + rank)) for rank in [*range(world), 1]]
    assert run_ranks(_copies, world, shared_memory) == [expected] * world


def test_one_rank_alone_does_nothing():
    tensor = torch.arange(4.0, requires_grad=True)
    assert all_reduce(tensor, None, async_op=True) is DONE
    assert reduce_scatter_flat(tensor, None) is DONE
    assert broadcast(tensor, source=3, group=None) is DONE
    assert tensor.tolist() == [0, 1, 2, 3]
    output = torch.zeros(4)
    assert all_gather_flat(output, tensor.detach(), None) is DONE
    assert output.tolist() == [0, 1, 2, 3]
    assert all_gather_uneven(output, None, dim=0, sizes=[4]) is output
    assert all_gather_objects("a", None) == ["a"]
    assert broadcast_object("a", source=0, group=None) == "a"
    barrier(None)


def _exchanges(ctx, shared_memory):
    mesh = _mesh(ctx, shared_memory)
    size = ctx.world_size
    try:
        for numel in NUMELS:
            for dtype in DTYPES:
                width = numel // 4 + 1
                everyone = [_values(rank, width * size, dtype) for rank in range(size)]
                mine = everyone[ctx.rank].clone()
                received = torch.empty_like(mine)
                work = exchange_flat(received, mine, mesh.tp, async_op=True)
                total = torch.ones(3)
                all_reduce(total, mesh.tp)
                work.wait()
                expected = torch.cat([each.view(size, width)[ctx.rank] for each in everyone])
                assert torch.equal(received, expected), (numel, dtype)
                assert torch.equal(mine, everyone[ctx.rank]), "the sent tensor stays"
                assert total.tolist() == [size] * 3
        alone = torch.empty(5)
        assert exchange_flat(alone, torch.arange(5.0), None) is DONE
        assert alone.tolist() == [0, 1, 2, 3, 4]
    finally:
        mesh.close()


@pytest.mark.parametrize("shared_memory", TRANSPORTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_an_exchange_hands_every_rank_its_slices(world_size, shared_memory):
    run_ranks(_exchanges, world_size, shared_memory)
