"""What is no pair of stacked matrices is refused; the mathematics is compared in tests/parity."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.experts import check_experts, cut_experts, expert_dims
from goose_strategy.tensor_parallel.slicing import Slicer
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import with_mesh


class Experts(nn.Module):
    """Every expert computes every token, weighted."""

    def __init__(self, width: int = 4, view: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(width)
        shapes = {"gate_up_proj": (3, 2 * width, 5), "down_proj": (3, 5, width)}
        for name, shape in shapes.items():
            draw = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(draw))
        self.view = view

    def forward(self, hidden: Tensor, index: Tensor, *, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,ewh->etw", hidden, self.gate_up_proj).chunk(2, dim=-1)
        out = torch.einsum("etw,ehw->eth", torch.tanh(gate) * up, self.down_proj)
        total = torch.einsum("eth,te->th", out, weights)
        return total.view(-1, 1, 5)[:, 0] if self.view else total


class Transposed(Experts):
    """Llama 4's and Aria's layout: the matrices are multiplied as they are."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.data = param.data.transpose(1, 2).contiguous()

    def forward(self, hidden: Tensor, index: Tensor, *, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,ehw->etw", hidden, self.gate_up_proj).chunk(2, dim=-1)
        out = torch.einsum("etw,ewh->eth", torch.tanh(gate) * up, self.down_proj)
        return torch.einsum("eth,te->th", out, weights)


def _run(module: nn.Module) -> list[Tensor]:
    hidden = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5).requires_grad_()
    weights = torch.linspace(0.1, 1, 6, dtype=torch.float64).view(2, 3).requires_grad_()
    out = module(hidden * 1, torch.zeros(2, dtype=torch.long), weights=weights * 1)
    (out * torch.arange(10.0, dtype=torch.float64).view(2, 5)).sum().backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    return [out.detach(), hidden.grad, weights.grad]


PLAIN = {"gate_up_proj": 1, "down_proj": 2}
DIMS = {"plain": PLAIN, "view": PLAIN, "transposed": {"gate_up_proj": 2, "down_proj": 1}}


@with_mesh
def _cut(_ctx: Context, mesh: Any, kind: str) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    module = Transposed() if kind == "transposed" else Experts(view=kind == "view")
    assert expert_dims(module) == DIMS[kind]
    check_experts("experts", module, mesh.tp_size)
    cut_experts(module, Slicer(parts=mesh.tp_size, index=mesh.tp_rank), mesh.tp)
    return _run(module), [tuple(p.shape) for p in module.parameters()]


@pytest.mark.parametrize("kind", sorted(DIMS))
def test_cut_experts_equal_whole_ones(kind: str) -> None:
    expected = _run(Experts())
    for found, shapes in run_ranks(_cut, 2, kind):
        whole = [(3, 4, 5), (3, 5, 2)]
        assert shapes == [(e, b, a) if kind == "transposed" else (e, a, b) for e, a, b in whole]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)


def test_other_shapes_are_refused() -> None:
    check_experts("mlp.experts", Experts(), 4)
    with pytest.raises(PlanError, match=r"tp=3 does not divide the width of mlp.experts, 4"):
        check_experts("mlp.experts", Experts(), 3)
    with pytest.raises(PlanError, match=r"mlp=Linear holds .* Give it the style 'replicated'"):
        check_experts("mlp", nn.Linear(2, 2))
    assert expert_dims(nn.Linear(2, 2)) == {}
    biased = Experts()
    biased.down_proj_bias = nn.Parameter(torch.zeros(3, 5))
    with pytest.raises(PlanError, match="down_proj_bias"):
        check_experts("mlp.experts", biased)
