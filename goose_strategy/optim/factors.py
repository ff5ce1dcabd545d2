"""Ranks must scale the loss of a pipelined call by the same number; here they compare.

A pipelined call's gradients are released times the factor that the user's arithmetic put on the
loss (``/ accumulate``, a weight). Stages of one replica that see different factors would train
parts of one model by different losses, and nothing would look wrong. Autograd cannot notice: each
rank's backward is its own. So the factors travel with the next thing that all ranks decide
together, the gradient clipping or the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from goose_strategy.comm.collectives import all_gather_flat
from goose_strategy.errors import BatchError

if TYPE_CHECKING:
    from goose_strategy.data_parallel.reducer import Reducer
    from goose_strategy.mesh.mesh import ParallelMesh


def take_factors(reducers: Iterable[Reducer]) -> float | Tensor:
    """Return the sum of the factors that calls were released with, and note that it was taken."""
    total: float | Tensor = 0.0
    for reducer in reducers:
        if reducer.factors is not None:
            total, reducer.factors = total + reducer.factors, None
    return total


def check_factors(factors: Iterable[float]) -> None:
    """Check that all ranks' factors are equal.

    Raises:
        BatchError: If they are not; alike on all ranks.
    """
    factors = list(factors)
    # NaN is unlike itself, but a loss that all ranks multiplied by NaN was scaled alike.
    if len({str(factor) for factor in factors}) > 1:
        raise BatchError(
            f"ranks multiplied the loss of a pipelined call by different factors, {factors} by "
            "rank (0.0 is a rank that called no backward); the loss must be scaled equally on all "
            "ranks."
        )


class FactorCheck:
    """Compares factors ahead of a step, without making the host wait for a device.

    On the CPU the ranks compare before anything is written. On a device the answer is read when the
    next step asks, so that a mistake is told one step late, but is told.

    Args:
        mesh: Where the ranks are.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._answer: Tensor | None = None
        self._event: torch.Event | None = None

    def exchange(self, reducer: Reducer) -> list[float]:
        """Gather what no clipping has compared yet. Collective over the world if there is any.

        Returns:
            The factors by rank; on a device those of the step before. Empty if there are none.
        """
        if reducer.factors is None:
            return []
        mesh = self._mesh
        mine = torch.zeros(1, dtype=torch.float64, device=mesh.device) + take_factors([reducer])
        everyone = mine.new_empty(mesh.layout.world_size)
        all_gather_flat(everyone, mine, mesh.world).wait()
        return self.read(everyone)

    def read(self, everyone: Tensor) -> list[float]:
        """Return gathered numbers: at once on the CPU, on a device those of the call before."""
        return everyone.tolist() if everyone.device.type == "cpu" else self._later(everyone)

    def _later(self, everyone: Tensor) -> list[float]:
        """Start to copy an answer to the host; return the one before, which has long arrived."""
        earlier: list[float] = []
        if self._answer is not None and self._event is not None:
            self._event.synchronize()
            earlier = self._answer.tolist()
        self._answer = everyone.to("cpu", non_blocking=True)
        self._event = torch.Event(everyone.device)
        self._event.record()
        return earlier
