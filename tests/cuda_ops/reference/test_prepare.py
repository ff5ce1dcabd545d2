from __future__ import annotations

import math

import pytest
import torch

from cuda_ops.reference.prepare import prepare
from cuda_ops.state import Algorithm, Derived, Hyper, StepState


def state_of(algorithm: Algorithm = Algorithm.ADAM) -> StepState:
    state = StepState.allocate(algorithm, 1)
    for column, value in {
        Hyper.LR: 1e-3,
        Hyper.BETA1: 0.9,
        Hyper.BETA2: 0.99,
        Hyper.EPS: 1e-8,
        Hyper.WEIGHT_DECAY: 0.1,
        Hyper.DECOUPLED: 1.0,
    }.items():
        state.hyper[0, column] = value
    return state


def norm2(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_bias_corrections_are_those_of_adam() -> None:
    state = state_of()
    for step in range(1, 40):
        prepare(state, norm2(1.0), 0.0, None)
        assert int(state.step) == step
        row = state.derived[0]
        assert float(row[Derived.STEP_SIZE]) == pytest.approx(1e-3 / (1 - 0.9**step), rel=1e-6)
        expected = 1 / math.sqrt(1 - 0.99**step)
        assert float(row[Derived.INV_ROOT2]) == pytest.approx(expected, rel=1e-6)
        assert float(row[Derived.DECAY]) == pytest.approx(1 - 1e-4)
        assert float(row[Derived.L2]) == 0.0


@pytest.mark.parametrize(
    ("norm", "max_norm", "scale", "clip"),
    [
        (2.0, 0.0, None, 1.0),
        (2.0, 1.0, None, 0.5),
        (2.0, 3.0, None, 1.0),
        (2.0, 1.0, 0.25, 1.0),
        (8.0, 1.0, 0.25, 0.5),
        (0.0, 1.0, None, 1.0),
    ],
)
def test_clipping(norm: float, max_norm: float, scale: float | None, clip: float) -> None:
    state = state_of()
    factor = None if scale is None else torch.tensor([scale])
    prepare(state, norm2(norm**2), max_norm, factor)
    assert float(state.norm) == pytest.approx(norm * (scale or 1.0))
    assert float(state.clip) == pytest.approx(clip, rel=1e-5)
    assert float(state.grad_factor) == pytest.approx((scale or 1.0) * clip, rel=1e-5)


@pytest.mark.parametrize(
    ("value", "scale"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1e70, 1e30)]
)
def test_what_is_not_finite_skips_and_changes_nothing_else(value: float, scale: float) -> None:
    state = state_of()
    prepare(state, norm2(4.0), 1.0, None)
    powers, derived = state.powers.clone(), state.derived.clone()
    factor = float(state.grad_factor)
    for skipped in (1, 2):
        prepare(state, norm2(value), 1.0, torch.tensor([scale]))
        assert state.counters.tolist() == [1, skipped, skipped, 1]
    assert torch.equal(state.powers, powers)
    assert torch.equal(state.derived, derived)
    assert float(state.grad_factor) == factor
    assert not math.isfinite(float(state.norm))
    prepare(state, norm2(4.0), 1.0, None)
    assert state.counters.tolist() == [2, 2, 0, 0]


def test_the_first_momentum_of_sgd_is_the_gradient() -> None:
    state = state_of(Algorithm.SGD)
    state.hyper[0, Hyper.BETA2] = 0.25  # dampening
    gains = []
    for value in (1.0, math.nan, 1.0, 1.0):
        prepare(state, norm2(value), 0.0, None)
        gains.append(float(state.derived[0, Derived.ONE_MINUS_BETA2]))
    # The skipped step was none: the gains are those of step 1, of nothing, and of steps 2 and 3.
    assert gains == [1.0, 1.0, 0.75, 0.75]


def test_a_group_that_comes_later_starts_anew() -> None:
    state = StepState.allocate(Algorithm.ADAM, 2)
    state.hyper[:, Hyper.LR] = 1.0
    state.hyper[:, Hyper.BETA1] = 0.5
    state.powers[0] = 0.25
    prepare(state, norm2(1.0), 0.0, None)
    found = state.derived[:, Derived.STEP_SIZE].tolist()
    assert found == pytest.approx([1 / (1 - 0.125), 2.0], rel=1e-6)


def test_no_groups() -> None:
    state = StepState.allocate(Algorithm.LION, 0)
    prepare(state, norm2(1.0), 0.0, None)
    assert int(state.step) == 1
