"""Conjugate pairs: values and gradients against one process that computes the whole."""

from datetime import timedelta

import pytest
import torch

from goose_strategy.comm.conjugate import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    sum_value,
)
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
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
        inside = copy_to_group(x, mesh.tp) @ my_up.T
        hidden = gather_from_group(torch.tanh(inside), mesh.tp, dim=-1, sizes=sizes)
        y = reduce_from_group(torch.tanh(inside) @ my_down.T, mesh.tp)
        loss = ((y - target) ** 2).sum() + hidden.pow(3).sum()
        loss.backward()
        total = sum_value(torch.tensor(float(ctx.rank + 1), requires_grad=True) * 2, mesh.tp)
        return loss.item(), x.grad, my_up.grad, my_down.grad, total.item()
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
    for rank, (value, x_grad, up_grad, down_grad, total) in enumerate(got):
        assert value == pytest.approx(loss.item(), rel=1e-13)
        assert torch.equal(x_grad, got[0][1])
        sizes = _cut(world)
        for found, wanted in (
            (x_grad, x.grad),
            (up_grad, up.grad.split(sizes)[rank]),
            (down_grad, down.grad.split(sizes, dim=1)[rank]),
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert total == world * (world + 1)


def _without_gradients(ctx):
    mesh = _mesh(ctx, shared_memory=True)
    try:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                x = torch.full((2, 2), float(ctx.rank + 1))
                entered = copy_to_group(x, mesh.tp)
                assert entered is x
                total = reduce_from_group(x, mesh.tp)
                assert x[0, 0] == ctx.rank + 1  # left as it is
                whole = gather_from_group(x, mesh.tp, dim=0, sizes=[2] * mesh.tp_size)
                assert not total.requires_grad
                assert total.tolist() == [[3.0, 3.0]] * 2
                assert whole.tolist() == [[1.0, 1.0]] * 2 + [[2.0, 2.0]] * 2
    finally:
        mesh.close()


def test_they_work_without_gradients():
    run_ranks(_without_gradients, 2)


def _shared_gradient(ctx):
    """The gradient that enters the copy's backward also belongs to another node."""
    mesh = _mesh(ctx, shared_memory=True)
    try:
        x = torch.ones(3, requires_grad=True)
        y = torch.ones(3, requires_grad=True)
        early = y * 1  # its backward runs after that of the copy, which is made later
        (copy_to_group(x, mesh.tp) + early).backward(torch.full((3,), float(ctx.rank + 1)))
        return x.grad.tolist(), y.grad.tolist()
    finally:
        mesh.close()


def test_a_gradient_that_others_hold_is_not_overwritten():
    assert run_ranks(_shared_gradient, 2) == [([3.0] * 3, [1.0] * 3), ([3.0] * 3, [2.0] * 3)]


def test_one_rank_alone_is_the_identity():
    x = torch.ones(2, requires_grad=True)
    assert copy_to_group(x, None) is x
    assert reduce_from_group(x, None) is x
    assert sum_value(x, None) is x
    assert gather_from_group(x, None, dim=0, sizes=[2]) is x
