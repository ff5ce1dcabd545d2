"""What the shards of one optimizer share in a native step: hyperparameters, step counts, skips.

torch counts steps per parameter, because one without a gradient is left alone and must not age;
kernels that take one number for all of them correct the bias of such a parameter wrongly, without a
message. Here parameters of one group that were always stepped together share a row of the device's
tables, and a row is divided when their histories part:

    row 0    group 0, stepped 7 times        row 2    group 0, stepped 4 times
    row 1    group 1, stepped 7 times                 (had no gradient in three steps)

The host writes hyperparameters and reads nothing: on a device, whether a step was skipped is known
to the host one step later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cuda_ops import ops
from cuda_ops.state import Algorithm, Hyper, StepState
from goose_strategy.optim.rules import Row, Rule, hyper_row


class Clock:
    """Rows of hyperparameters and step counts on the device.

    Args:
        rule: How the optimizer is stepped.
        device: Where its shards lie.

    Attributes:
        state: The tables that every shard's step reads.
        groups: Parameter group of each row.
        steps: ``[rows]`` int64 on the device: how often each row was stepped.
    """

    def __init__(self, rule: Rule, device: torch.device) -> None:
        self._rule = rule
        self._device = device
        self.state = StepState.allocate(rule.algorithm, 0, device=device)
        self.groups: list[int] = []
        self.steps = torch.zeros(0, dtype=torch.int64, device=device)
        self._aged: list[bool] = []
        self._written: list[Row] = []
        self._active: tuple[bool, ...] = ()
        self._active_on_device = torch.zeros(0, dtype=torch.int64, device=device)

    # -- rows ----------------------------------------------------------------------------------

    def row_of(self, group: int) -> int:
        """Return the row of parameters of ``group`` that were never stepped."""
        for row, (owner, aged) in enumerate(zip(self.groups, self._aged, strict=True)):
            if owner == group and not aged:
                return row
        return self._append(group, torch.zeros(1, dtype=torch.int64, device=self._device))

    def divide(self, row: int) -> int:
        """Return a new row with the group and the history of ``row``."""
        new = self._append(self.groups[row], self.steps[row : row + 1].clone())
        self._aged[new] = self._aged[row]
        return new

    def rows_at(self, wanted: Sequence[tuple[int, int]]) -> list[int]:
        """Return rows for parameters with a history.

        Args:
            wanted: Group and number of steps of each parameter.
        """
        known: dict[tuple[int, int], int] = {}
        for group, taken in wanted:
            if (group, taken) in known:
                continue
            if taken == 0:
                known[group, taken] = self.row_of(group)
            else:
                steps = torch.tensor([taken], dtype=torch.int64, device=self._device)
                known[group, taken] = self._append(group, steps)
                self._aged[known[group, taken]] = True
        return [known[key] for key in wanted]

    def clear(self, count: int) -> None:
        """Forget all rows.

        Args:
            count: Steps that the optimizer has taken, which stochastic rounding draws from.
        """
        self.state = StepState.allocate(self._rule.algorithm, 0, device=self._device)
        self.state.counters[0] = count
        self.groups, self._aged, self._written, self._active = [], [], [], ()
        self.steps = torch.zeros(0, dtype=torch.int64, device=self._device)

    def _append(self, group: int, steps: Tensor) -> int:
        one = StepState.allocate(self._rule.algorithm, 1, device=self._device)
        self.state = replace(
            self.state,
            hyper=torch.cat([self.state.hyper, one.hyper]),
            powers=torch.cat([self.state.powers, one.powers]),
            derived=torch.cat([self.state.derived, one.derived]),
        )
        self.groups.append(group)
        self.steps = torch.cat([self.steps, steps])
        self._aged.append(False)
        self._written, self._active = [], ()
        return len(self.groups) - 1

    # -- a step --------------------------------------------------------------------------------

    def prepare(
        self, param_groups: Sequence[Mapping[str, Any]], active: Collection[int], norm2: Tensor
    ) -> None:
        """Decide whether the step is taken, and compute what the shards need for it.

        Args:
            param_groups: The optimizer's groups.
            active: Rows that have gradients; the others do not age.
            norm2: Squared norm of the gradients of the whole model, an fp64 scalar; the step is
                skipped unless it is finite.
        """
        self._write(param_groups)
        self._set_powers()
        ops.prepare(self.state, norm2.view(1))
        flags = tuple(row in active for row in range(len(self.groups)))
        if flags != self._active:
            self._active = flags
            self._active_on_device = torch.tensor(flags, dtype=torch.int64).to(self._device)
        self.steps += self._active_on_device * (1 - self.state.skip)
        self._aged = [aged or flag for aged, flag in zip(self._aged, flags, strict=True)]

    def _write(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Write hyperparameters that changed since the last step."""
        rows = [hyper_row(self._rule, param_groups[group]) for group in self.groups]
        on_device = any(isinstance(value, Tensor) for row in rows for value in row)
        if rows == self._written and not on_device:
            return
        for index, row in enumerate(rows):
            numbers = [0.0 if isinstance(value, Tensor) else float(value) for value in row]
            self.state.hyper[index] = torch.tensor(numbers, dtype=torch.float64)
            for column, value in enumerate(row):
                if isinstance(value, Tensor):
                    self.state.hyper[index, column] = value.detach()
        self._written = [] if on_device else rows

    def _set_powers(self) -> None:
        """Compute the powers of the betas from the counts, as torch does.

        Products that run along would not follow a scheduler that changes a beta.
        """
        powers, counts = self.state.powers, self.steps.double()
        powers[:, 0] = self.state.hyper[:, Hyper.BETA1] ** counts
        if self._rule.algorithm == Algorithm.SGD:
            # The mark of a first step.
            powers[:, 1] = (counts == 0).double()
        else:
            powers[:, 1] = self.state.hyper[:, Hyper.BETA2] ** counts
