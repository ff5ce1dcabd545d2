from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from goose_strategy.tensor_parallel.slicing import Slicer
from tests.harness.compare import relative_error
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import with_mesh


class Pair(NamedTuple):
    """A column and a row layer, and what they saw."""

    output: Tensor
    input_grad: Tensor
    column: list[Tensor]
    row: list[Tensor]


def _layers(hidden: int, dtype: torch.dtype) -> tuple[nn.Linear, nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    up, down = nn.Linear(6, hidden, dtype=dtype), nn.Linear(hidden, 6, dtype=dtype)
    with torch.no_grad():
        for param in (up.weight, up.bias, down.weight, down.bias):
            param.copy_(draw(*param.shape))
    return up, down, draw(2, 3, 6).requires_grad_(), draw(2, 3, 6)


def _run(up: nn.Linear, down: nn.Linear, x: Tensor, seed: Tensor, autocast: bool) -> Pair:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = down(torch.tanh(up(x)))
    output.backward(seed.to(output.dtype))
    grads = [[p.grad for p in layer.parameters()] for layer in (up, down)]
    return Pair(output.detach(), x.grad, *grads)  # type: ignore[arg-type]


@with_mesh
def _parallel(
    ctx: Context, mesh: ParallelMesh, hidden: int, dtype: torch.dtype, autocast: bool
) -> Pair:
    up, down, x, seed = _layers(hidden, dtype)
    slicer = Slicer(parts=mesh.tp_size, index=mesh.tp_rank)
    up = ColumnParallelLinear.convert(up, slicer, mesh.tp)
    RowParallelLinear.convert(down, slicer, mesh.tp)
    assert up.cut is not None
    assert f"out_features of this rank={up.cut.start}:{up.cut.stop}" in repr(up)
    assert "in_features of this rank" in repr(down)
    return _run(up, down, x, seed, autocast)


@pytest.mark.parametrize(
    ("tp", "hidden", "dtype", "autocast", "rel"),
    [
        (2, 8, torch.float64, False, 1e-14),
        (4, 8, torch.float64, False, 1e-14),
        # The layers themselves do not ask for equal slices; the plan does, for heads.
        (2, 9, torch.float64, False, 1e-14),
        (2, 8, torch.float32, False, 1e-6),
        (2, 8, torch.float32, True, 2e-2),
        (2, 8, torch.bfloat16, False, 3e-2),
    ],
)
def test_a_column_and_a_row_layer_are_the_plain_pair(
    tp: int, hidden: int, dtype: torch.dtype, autocast: bool, rel: float
) -> None:
    expected = _run(*_layers(hidden, dtype), autocast)
    pairs = run_ranks(_parallel, tp, hidden, dtype, autocast)
    for pair in pairs:
        assert pair.output.dtype == expected.output.dtype
        assert relative_error(pair.output, expected.output) <= rel
        assert relative_error(pair.input_grad, expected.input_grad) <= rel
        # The row bias is whole, and so is its gradient.
        assert relative_error(pair.row[1], expected.row[1]) <= rel
    for index in range(2):
        joined = torch.cat([pair.column[index] for pair in pairs])
        assert relative_error(joined, expected.column[index]) <= rel
    assert relative_error(torch.cat([p.row[0] for p in pairs], 1), expected.row[0]) <= rel


@with_mesh
def _head(ctx: Context, mesh: ParallelMesh) -> tuple[Tensor, Tensor]:
    _, head, x, seed = _layers(6, torch.float64)
    slicer = Slicer(parts=mesh.tp_size, index=mesh.tp_rank)
    ColumnParallelLinear.convert(head, slicer, mesh.tp, gathers_output=True)
    output = head(x)
    output.backward(seed)
    assert x.grad is not None
    return output.detach(), x.grad


def test_a_gathered_output_is_whole_and_differentiable() -> None:
    _, head, x, seed = _layers(6, torch.float64)
    expected = head(x)
    expected.backward(seed)
    for output, grad in run_ranks(_head, 4):
        assert relative_error(output, expected.detach()) <= 1e-14
        assert relative_error(grad, x.grad) <= 1e-14  # type: ignore[arg-type]
