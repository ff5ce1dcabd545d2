"""The state of an optimizer's step, which all its shards share.

torch's optimizers count steps per parameter, and pass learning rate and bias corrections as numbers
of the host. Here they lie in tensors on the device: a step waits for nothing, may be skipped by a
decision that was made on the device, and can be recorded in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

HYPER_COLUMNS = 8
POWER_COLUMNS = 2
DERIVED_COLUMNS = 12


class Algorithm(IntEnum):
    """The update rule. ``ADAM`` is Adam and AdamW: the hyperparameters say which."""

    ADAM = 0
    LION = 1
    SGD = 2


class Hyper(IntEnum):
    """Columns of ``StepState.hyper``; SGD keeps its momentum in BETA1, its dampening in BETA2."""

    LR = 0
    BETA1 = 1
    BETA2 = 2
    EPS = 3
    WEIGHT_DECAY = 4
    SIGN = 5
    NESTEROV = 6
    DECOUPLED = 7


class Derived(IntEnum):
    """Columns of ``StepState.derived``, which ``prepare`` fills."""

    DECAY = 0
    L2 = 1
    BETA1 = 2
    ONE_MINUS_BETA1 = 3
    BETA2 = 4
    ONE_MINUS_BETA2 = 5
    STEP_SIZE = 6
    INV_ROOT2 = 7
    EPS = 8
    SIGN = 9
    NESTEROV = 10


@dataclass(frozen=True, kw_only=True)
class StepState:
    """What all shards of one optimizer share in a step: tensors on the device.

    Attributes:
        algorithm: The update rule.
        hyper: ``[groups, 8]`` fp64, columns ``Hyper``; may be written at any time.
        powers: ``[groups, 2]`` fp64: the betas to the power of the steps taken, 1.0 at first.
        derived: ``[groups, 12]`` fp32, columns ``Derived``; written by ``prepare``.
        counters: ``[4]`` int64: steps taken, steps skipped, skipped in a row, and whether to skip
            this one (0 or 1).
        scalars: ``[4]`` fp32: factor of the gradients, norm, clip coefficient, unused.
    """

    algorithm: Algorithm
    hyper: Tensor
    powers: Tensor
    derived: Tensor
    counters: Tensor
    scalars: Tensor

    @classmethod
    def allocate(
        cls, algorithm: Algorithm, groups: int, *, device: torch.device | str = "cpu"
    ) -> StepState:
        """Make the state of an optimizer that has not stepped yet.

        Args:
            algorithm: The update rule.
            groups: Rows of hyperparameters.
            device: Where the shards lie.
        """
        hyper = torch.zeros(groups, HYPER_COLUMNS, dtype=torch.float64)
        hyper[:, Hyper.SIGN] = 1.0
        return cls(
            algorithm=algorithm,
            hyper=hyper.to(device),
            powers=torch.ones(groups, POWER_COLUMNS, dtype=torch.float64, device=device),
            derived=torch.zeros(groups, DERIVED_COLUMNS, device=device, dtype=torch.float32),
            counters=torch.zeros(4, dtype=torch.int64, device=device),
            scalars=torch.zeros(4, dtype=torch.float32, device=device),
        )

    @property
    def step(self) -> Tensor:
        """``[]`` int64: steps taken."""
        return self.counters[0]

    @property
    def skipped(self) -> Tensor:
        """``[]`` int64: steps skipped because the norm was not finite."""
        return self.counters[1]

    @property
    def skipped_in_a_row(self) -> Tensor:
        """``[]`` int64: steps skipped since the last one that was taken."""
        return self.counters[2]

    @property
    def skip(self) -> Tensor:
        """``[]`` int64: 1 if the step that was prepared last must change nothing."""
        return self.counters[3]

    @property
    def grad_factor(self) -> Tensor:
        """``[]`` fp32: what gradients are multiplied by: scale times clip coefficient."""
        return self.scalars[0]

    @property
    def norm(self) -> Tensor:
        """``[]`` fp32: norm of the scaled gradients before clipping."""
        return self.scalars[1]

    @property
    def clip(self) -> Tensor:
        """``[]`` fp32: the clip coefficient, at most 1."""
        return self.scalars[2]
