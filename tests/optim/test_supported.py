"""Which optimizers are taken, and whose bits they give."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from goose_strategy.errors import ConfigError
from goose_strategy.optim.supported import ELEMENTWISE, check_supported, prefers_fused
from tests.data_parallel import toy
from tests.data_parallel.toy import STEPS, Plain, Replicated, Sharded, Trace, batch
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.optim.test_zero import grouped

PARAM = [nn.Parameter(torch.ones(2, 2))]


class Defaults(optim.AdamW):
    """A subclass that brings other defaults only."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)


class Rescaling(optim.SGD):
    """A subclass whose step looks at whole tensors."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad /= param.grad.norm()
        return super().step(closure)


@pytest.mark.parametrize("kind", [*ELEMENTWISE, Defaults], ids=lambda kind: kind.__name__)
def test_elementwise_optimizers_are_taken(kind: type[Optimizer]) -> None:
    check_supported(kind(PARAM))


@pytest.mark.parametrize(
    "kind",
    [optim.LBFGS, optim.SparseAdam, optim.Adafactor, optim.Muon, Rescaling],
    ids=lambda kind: kind.__name__,
)
def test_others_are_refused_by_name(kind: type[Optimizer]) -> None:
    with pytest.raises(ConfigError, match=f"optimizer={kind.__name__} cannot be sharded"):
        check_supported(kind(PARAM))


@pytest.mark.parametrize(
    ("kind", "device", "fused"),
    [
        (optim.AdamW, "cpu", True),
        (optim.SGD, "cpu", False),
        (optim.RMSprop, "cpu", False),
        (optim.AdamW, "cuda", False),
    ],
)
def test_the_fused_kernel_is_preferred_on_the_cpu(
    kind: type[Optimizer], device: str, fused: bool
) -> None:
    assert prefers_fused(kind(PARAM, lr=1e-3), torch.device(device)) is fused


# -- the same bits as ddp --------------------------------------------------------------------------


def _unclipped(driver: Plain) -> None:
    for step in range(STEPS):
        x = driver.rows(batch(step, torch.float32))
        driver.backward(driver.forward(x).square().mean())
        driver.optimizer.step()
        driver.optimizer.zero_grad()


def _beside_ddp(ctx: Context, wanted: Any) -> tuple[dict[str, bool], Trace, Trace]:
    mesh = toy.make_mesh(ctx.world_size)
    ddp = Replicated(toy.toy(torch.float32, branches=1), wanted, mesh)
    _unclipped(ddp)
    theirs = ddp.finish()
    ours = Sharded(toy.toy(torch.float32, branches=1), wanted, mesh)
    _unclipped(ours)
    mine = ours.finish()
    same = {n: torch.equal(p, theirs.parameters[n]) for n, p in mine.parameters.items()}
    return same, mine, theirs


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (optim.AdamW, {"lr": 1e-2, "fused": False}),
        (optim.AdamW, {"lr": 1e-2, "foreach": True}),
        (optim.RMSprop, {"lr": 1e-3}),
        (optim.SGD, {"lr": 1e-1, "momentum": 0.9}),
        (optim.SGD, {"lr": 1e-1, "momentum": 0.9, "fused": True}),
    ],
)
def test_two_replicas_in_fp32_give_the_bits_of_ddp(
    kind: type[Optimizer], options: dict[str, Any]
) -> None:
    """Adding two numbers has one order, and halving is exact; more replicas add in other orders."""
    for same, _, _ in run_ranks(_beside_ddp, 2, partial(grouped, kind, options)):
        assert all(same.values()), same


@pytest.mark.parametrize("fused", [None, True])
def test_the_fused_kernel_is_chosen_where_the_choice_is_open_and_rounds_otherwise(
    fused: bool | None,
) -> None:
    """Its elements at the end of a tensor, too, round otherwise; and slices end elsewhere."""
    wanted = partial(grouped, optim.AdamW, {"lr": 1e-2, "fused": fused})
    for same, mine, theirs in run_ranks(_beside_ddp, 2, wanted):
        assert not all(same.values()), "the loop was used"
        assert toy.largest_gap(mine.parameters, theirs.parameters) < 5e-7
