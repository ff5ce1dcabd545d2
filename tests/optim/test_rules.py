"""Which optimizers are stepped natively, and by which numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from cuda_ops.state import Hyper
from goose_strategy.optim.lion import Lion
from goose_strategy.optim.rules import ADAM, LION, SGD, hyper_row, keeps_first, obstacle, rule_of

PARAM = nn.Parameter(torch.zeros(3))


class Mine(optim.AdamW):
    """A subclass that steps as its base does."""


class Other(optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do something else."""


def test_the_step_decides_not_the_name() -> None:
    assert rule_of(optim.AdamW([PARAM])) is ADAM
    assert rule_of(optim.Adam([PARAM])) is ADAM
    assert rule_of(Mine([PARAM])) is ADAM
    assert rule_of(optim.SGD([PARAM], lr=1)) is SGD
    assert rule_of(Lion([PARAM])) is LION
    assert rule_of(Other([PARAM])) is None
    assert rule_of(optim.NAdam([PARAM])) is None


def test_what_is_in_the_way_is_named() -> None:
    assert obstacle(optim.AdamW([PARAM], maximize=True, capturable=False, foreach=True)) is None
    assert obstacle(optim.AdamW([PARAM], fused=True)) is None
    assert obstacle(optim.AdamW([PARAM], amsgrad=True)) == "amsgrad=True"
    assert obstacle(optim.SGD([PARAM], lr=1, differentiable=True)) == "differentiable=True"
    assert obstacle(optim.RMSprop([PARAM])) == "optimizer=RMSprop"


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        (optim.AdamW([PARAM], lr=0.1), {Hyper.DECOUPLED: 1, Hyper.SIGN: 1, Hyper.EPS: 1e-8}),
        (optim.Adam([PARAM], lr=0.1, weight_decay=0.3), {Hyper.DECOUPLED: 0}),
        (optim.Adam([PARAM], lr=0.1, decoupled_weight_decay=True), {Hyper.DECOUPLED: 1}),
        (optim.AdamW([PARAM], lr=0.1, maximize=True), {Hyper.SIGN: -1}),
        (optim.SGD([PARAM], lr=0.1, momentum=0.8, dampening=0.2), {Hyper.BETA2: 0.2}),
        (optim.SGD([PARAM], lr=0.1, dampening=0.2), {Hyper.BETA1: 0, Hyper.BETA2: 0}),
        (optim.SGD([PARAM], lr=0.1, momentum=0.8, nesterov=True), {Hyper.NESTEROV: 1}),
        (Lion([PARAM], lr=0.1, betas=(0.8, 0.7)), {Hyper.BETA2: 0.7, Hyper.DECOUPLED: 1}),
    ],
)
def test_groups_become_rows(optimizer: optim.Optimizer, wanted: dict[Hyper, float]) -> None:
    rule = rule_of(optimizer)
    assert rule is not None
    row = hyper_row(rule, optimizer.param_groups[0])
    assert len(row) == len(Hyper)
    assert row[Hyper.LR] == 0.1
    for column, value in wanted.items():
        assert row[column] == value


def test_a_first_moment_is_kept_where_there_is_one() -> None:
    assert keeps_first(ADAM, optim.AdamW([PARAM]))
    assert keeps_first(SGD, optim.SGD([PARAM], lr=1, momentum=0.1))
    assert not keeps_first(SGD, optim.SGD([PARAM], lr=1))
