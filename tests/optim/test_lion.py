"""Lion in one process, against the formulas of its paper."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from goose_strategy.errors import ConfigError
from goose_strategy.optim.lion import Lion


@pytest.mark.parametrize("maximize", [False, True])
def test_a_step_is_the_sign_of_a_blend(maximize: bool) -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(40, dtype=torch.float64))
    idle = nn.Parameter(torch.ones(2))
    optimizer = Lion([param, idle], lr=0.01, betas=(0.9, 0.8), weight_decay=0.2, maximize=maximize)
    expected, momentum = param.detach().clone(), torch.zeros(40, dtype=torch.float64)
    for _ in range(5):
        param.grad = torch.randn(40, dtype=torch.float64)
        grad = -param.grad if maximize else param.grad
        expected -= 0.01 * ((0.9 * momentum + 0.1 * grad).sign() + 0.2 * expected)
        momentum = 0.8 * momentum + 0.2 * grad
        optimizer.step()
    assert torch.allclose(param.detach(), expected, rtol=1e-12)
    assert torch.allclose(optimizer.state[param]["exp_avg"], momentum)
    assert torch.equal(idle, torch.ones(2))


def test_a_closure_is_run_with_gradients() -> None:
    param = nn.Parameter(torch.ones(1))
    optimizer = Lion([param], lr=0.5)

    def closure() -> torch.Tensor:
        loss = param.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 1.0
    assert param.item() == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0"),
        ({"betas": (-0.1, 0.9)}, r"betas\[0\]=-0.1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ],
)
def test_numbers_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lion([nn.Parameter(torch.ones(1))], **settings)
