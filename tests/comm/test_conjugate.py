"""Conjugate pairs: values and gradients against one process that computes the whole."""

from datetime import timedelta

import pytest
import torch

from goose_strategy.comm.conjugate import gather_from_group, split_to_group
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.tensor_parallel.regions import enter_island, leave_island
from tests.harness.world import run_ranks

ROWS, IN, HIDDEN = 5, 6, 8


def _problem():
    generator = torch.Generator().manual_seed(3)
    x, up, down, target = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((ROWS, IN), (HIDDEN, IN), (IN, HIDDEN), (ROWS, IN))
    )
    return x, up, down, target


def _cut(size):
    """Uneven slices of the hidden dimension."""
    return [HIDDEN - (size - 1), *[1] * (size - 1)]


def _mesh(ctx, shared_memory):
    return ParallelMesh.create(
        MeshLayout.from_world(ctx.world_size, tp=ctx.world_size, pp=1),
        device=torch.device("cpu"),
        timeout=timedelta(seconds=30),
        shared_memory=shared_memory,
    )


def _column_row(ctx, shared_memory):
    """One MLP, cut over the group: column layer, activation, row layer."""
    mesh = _mesh(ctx, shared_memory)
    try:
        x, up, down, target = _problem()
        sizes = _cut(mesh.tp_size)
        x = x.requires_grad_()
        my_up = up.split(sizes)[mesh.tp_rank].clone().requires_grad_()
        my_down = down.split(sizes, dim=1)[mesh.tp_rank].clone().requires_grad_()
        inside = enter_island(x, mesh.tp) @ my_up.T
        hidden = gather_from_group(torch.tanh(inside), mesh.tp, dim=-1, sizes=sizes)
        mine = split_to_group(hidden, mesh.tp, dim=-1, sizes=sizes)
        y = leave_island(mine @ my_down.T, mesh.tp)
        loss = ((y - target) ** 2).sum() + hidden.pow(3).sum()
        loss.backward()
        return loss.item(), x.grad, my_up.grad, my_down.grad
    finally:
        mesh.close()


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_cut_mlp_equals_the_whole(world, shared_memory):
    x, up, down, target = (tensor.requires_grad_() for tensor in _problem())
    hidden = torch.tanh(x @ up.T)
    loss = ((hidden @ down.T - target) ** 2).sum() + hidden.pow(3).sum()
    loss.backward()
    got = run_ranks(_column_row, world, shared_memory)
    for rank, (value, x_grad, up_grad, down_grad) in enumerate(got):
        assert value == pytest.approx(loss.item(), rel=1e-13)
        assert torch.equal(x_grad, got[0][1])
        sizes = _cut(world)
        for found, wanted in (
            (x_grad, x.grad),
            (up_grad, up.grad.split(sizes)[rank]),
            (down_grad, down.grad.split(sizes, dim=1)[rank]),
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def _without_gradients(ctx):
    mesh = _mesh(ctx, shared_memory=True)
    try:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                x = torch.full((2, 2), float(ctx.rank + 1))
                whole = gather_from_group(x, mesh.tp, dim=0, sizes=[2] * mesh.tp_size)
                mine = split_to_group(whole, mesh.tp, dim=0, sizes=[2] * mesh.tp_size)
                assert torch.equal(mine, x)
                assert not mine.requires_grad
                assert whole.tolist() == [[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 2
    finally:
        mesh.close()


def test_they_work_without_gradients():
    run_ranks(_without_gradients, 2)


def test_one_rank_alone_is_the_identity():
    x = torch.ones(2, requires_grad=True)
    assert split_to_group(x, None, dim=0, sizes=[2]) is x
    assert gather_from_group(x, None, dim=0, sizes=[2]) is x
