"""What a step needs beyond its tensors: skip or not, the clip coefficient, bias corrections."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops.reference.roots import root64
from cuda_ops.state import Algorithm, Derived, Hyper, StepState

_CLIP_EPSILON = 1e-6


def prepare(state: StepState, norm2: Tensor, max_norm: float, scale: Tensor | None) -> None:
    """Decide whether the next step is taken, and fill ``derived`` and ``scalars`` for it.

    Args:
        state: Changed in place.
        norm2: fp64 ``[1]``, the squared norm of the unscaled gradients of the whole model.
        max_norm: Largest norm after scaling; 0 does not clip.
        scale: fp32 ``[1]`` multiplied into the gradients, or ``None``.
    """
    factor = torch.ones_like(state.norm) if scale is None else scale.view(())
    norm = root64(norm2.view(())).to(torch.float32) * factor
    good = norm.isfinite()
    clip = torch.ones_like(norm)
    if max_norm > 0:
        clip = (torch.full_like(norm, max_norm) / (norm + _CLIP_EPSILON)).clamp(max=1.0)
    scalars = torch.stack((factor * clip, norm, clip))
    kept = torch.stack((good, torch.ones_like(good), good))
    state.scalars[:3] = torch.where(kept, scalars, state.scalars[:3])
    powers = _next_powers(state)
    derived = _derive(state, powers)
    state.derived[:, : derived.shape[1]] = torch.where(
        good, derived, state.derived[:, : derived.shape[1]]
    )
    state.powers.copy_(torch.where(good, powers, state.powers))
    taken = good.to(torch.int64)
    step, skipped, row, _ = state.counters
    state.counters.copy_(
        torch.stack((step + taken, skipped + 1 - taken, (row + 1) * (1 - taken), 1 - taken))
    )


def _next_powers(state: StepState) -> Tensor:
    hyper, powers = state.hyper, state.powers
    second = powers[:, 1] * hyper[:, Hyper.BETA2]
    if state.algorithm == Algorithm.SGD:
        # A mark of the first step, whose momentum is the gradient without dampening.
        second = torch.zeros_like(second)
    return torch.stack((powers[:, 0] * hyper[:, Hyper.BETA1], second), dim=1)


def _derive(state: StepState, powers: Tensor) -> Tensor:
    h = state.hyper
    lr, decay = h[:, Hyper.LR], h[:, Hyper.WEIGHT_DECAY]
    one = torch.ones_like(lr)
    decoupled = h[:, Hyper.DECOUPLED] != 0
    step_size, inverse_root, gain = lr, one, one - h[:, Hyper.BETA2]
    if state.algorithm == Algorithm.ADAM:
        step_size = lr / (one - powers[:, 0])
        inverse_root = one / root64(one - powers[:, 1])
    if state.algorithm == Algorithm.SGD:
        gain = torch.where(state.powers[:, 1] == 1, one, gain)
    columns = {
        Derived.DECAY: torch.where(decoupled, one - lr * decay, one),
        Derived.L2: torch.where(decoupled, torch.zeros_like(decay), decay),
        Derived.BETA1: h[:, Hyper.BETA1],
        Derived.ONE_MINUS_BETA1: one - h[:, Hyper.BETA1],
        Derived.BETA2: h[:, Hyper.BETA2],
        Derived.ONE_MINUS_BETA2: gain,
        Derived.STEP_SIZE: step_size,
        Derived.INV_ROOT2: inverse_root,
        Derived.EPS: h[:, Hyper.EPS],
        Derived.SIGN: h[:, Hyper.SIGN],
        Derived.NESTEROV: h[:, Hyper.NESTEROV],
    }
    return torch.stack([columns[name] for name in Derived], dim=1).to(torch.float32)
