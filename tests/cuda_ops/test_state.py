from __future__ import annotations

import torch

from cuda_ops.state import Algorithm, Derived, Hyper, StepState


def test_a_new_state_has_not_stepped() -> None:
    state = StepState.allocate(Algorithm.ADAM, 3)
    assert state.hyper.shape == (3, len(Hyper))
    assert state.derived.shape == (3, len(Derived) + 1)  # 12 columns: rows of 48 bytes
    assert bool((state.powers == 1).all())
    assert [int(state.step), int(state.skipped), int(state.skip)] == [0, 0, 0]
    assert state.hyper[:, Hyper.SIGN].tolist() == [1.0, 1.0, 1.0]


def test_names_are_views() -> None:
    state = StepState.allocate(Algorithm.SGD, 1)
    state.counters.copy_(torch.tensor([1, 2, 3, 4]))
    state.scalars.copy_(torch.tensor([5.0, 6.0, 7.0, 0.0]))
    assert [int(t) for t in (state.step, state.skipped, state.skipped_in_a_row, state.skip)] == [
        1,
        2,
        3,
        4,
    ]
    assert [float(t) for t in (state.grad_factor, state.norm, state.clip)] == [5.0, 6.0, 7.0]
    state.step.add_(1)
    assert int(state.counters[0]) == 2
