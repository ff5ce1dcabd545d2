"""Rows of hyperparameters and step counts: exact per parameter, decided on the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cuda_ops.state import Hyper
from goose_strategy.optim.clock import Clock
from goose_strategy.optim.rules import ADAM, SGD

CPU = torch.device("cpu")
FINE, BAD = torch.tensor(4.0, dtype=torch.float64), torch.tensor(math.inf, dtype=torch.float64)


def adam_group(**changes: Any) -> dict[str, Any]:
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    return {**group, "decoupled_weight_decay": True, **changes}


def test_parameters_that_were_never_stepped_share_the_row_of_their_group() -> None:
    clock = Clock(ADAM, CPU)
    assert [clock.row_of(group) for group in (0, 1, 0, 1)] == [0, 1, 0, 1]
    clock.prepare([adam_group(), adam_group(lr=0.2)], {0}, FINE)
    assert clock.row_of(1) == 1, "it was not stepped yet"
    assert clock.row_of(0) == 2, "a parameter that comes later begins at step 0"
    assert clock.groups == [0, 1, 0]
    assert clock.steps.tolist() == [1, 0, 0]
    assert clock.state.hyper[:, Hyper.LR].tolist() == [0.1, 0.2, 0.0]


def test_only_rows_with_gradients_age_and_none_in_a_skipped_step() -> None:
    clock, groups = Clock(ADAM, CPU), [adam_group()]
    clock.row_of(0)
    clock.prepare(groups, {0}, FINE)
    other = clock.divide(0)
    clock.prepare(groups, {0}, FINE)
    clock.prepare(groups, {0, other}, BAD)
    clock.prepare(groups, {other}, FINE)
    assert clock.steps.tolist() == [2, 2]
    assert clock.state.counters.tolist()[:3] == [3, 1, 0]
    # Bias corrections as torch computes them, from the row's own count.
    assert clock.state.powers[0].tolist() == pytest.approx([0.9**3, 0.99**3])


def test_a_beta_that_a_scheduler_changes_counts_for_all_steps_as_in_torch() -> None:
    clock = Clock(ADAM, CPU)
    clock.row_of(0)
    clock.prepare([adam_group()], {0}, FINE)
    clock.prepare([adam_group(betas=(0.5, 0.9))], {0}, FINE)
    assert clock.state.powers[0].tolist() == pytest.approx([0.5**2, 0.9**2])


def test_a_rate_in_a_tensor_is_not_read_by_the_host() -> None:
    clock, rate = Clock(ADAM, CPU), torch.tensor(0.25)
    clock.row_of(0)
    clock.prepare([adam_group(lr=rate)], {0}, FINE)
    assert clock.state.hyper[0, Hyper.LR] == 0.25
    rate.fill_(0.5)
    clock.prepare([adam_group(lr=rate)], {0}, FINE)
    assert clock.state.hyper[0, Hyper.LR] == 0.5


def test_the_mark_of_a_first_step_of_momentum() -> None:
    group = {"lr": 0.1, "momentum": 0.9, "dampening": 1.0, "weight_decay": 0.0, "nesterov": False}
    clock = Clock(SGD, CPU)
    clock.row_of(0)
    gains = []
    for _ in range(3):
        clock.prepare([group], {0}, FINE)
        gains.append(clock.state.derived[0].clone())
    # The first momentum is the gradient, the later ones are dampened, here to nothing.
    assert not torch.equal(gains[0], gains[1])
    assert torch.equal(gains[1], gains[2])


def test_histories_are_brought_back() -> None:
    clock = Clock(ADAM, CPU)
    clock.row_of(0)
    clock.prepare([adam_group()], {0}, FINE)
    clock.clear(count=9)
    rows = clock.rows_at([(0, 7), (1, 7), (0, 0), (0, 7)])
    assert rows == [0, 1, 2, 0]
    assert clock.steps.tolist() == [7, 7, 0]
    clock.prepare([adam_group(), adam_group()], set(rows), FINE)
    assert clock.state.step == 10
    assert clock.steps.tolist() == [8, 8, 1]
    assert clock.state.powers[:, 0].tolist() == pytest.approx([0.9**8, 0.9**8, 0.9])


def test_an_optimizer_without_parameters_on_this_rank_counts_all_the_same() -> None:
    clock = Clock(ADAM, CPU)
    clock.prepare([adam_group()], set(), FINE)
    clock.prepare([adam_group()], set(), BAD)
    assert clock.state.counters.tolist() == [1, 1, 1, 1]
