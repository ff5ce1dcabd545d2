"""The sum over dp in half the bytes: gradients travel in bf16 and are added in fp32.

A reduce-scatter in bf16 rounds after every addition, and how often depends on the backend's ring.
Here each rank sends its slices rounded once, and the rank that steps a slice adds what it received
in fp32, in rank order: the same bits on every transport, an error that does not grow with dp.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.comm.collectives import Pending, exchange_flat

if TYPE_CHECKING:
    from goose_strategy.data_parallel.config import ZeroConfig
    from goose_strategy.mesh.mesh import ParallelMesh


class NarrowSum:
    """A reduce-scatter under way, in bf16 on the wire.

    Args:
        flat: ``[dp * n]``, fp32 or bf16. Afterwards this rank's slice holds the sum, rounded to
            its own type once; the other slices stay.
        group: The dp ranks.
    """

    def __init__(self, flat: Tensor, group: ProcessGroup) -> None:
        flat = flat.detach()
        self._own = flat.view(group.size(), -1)[group.rank()]
        # Kept until the wait: it is what travels.
        self._sent = flat.to(torch.bfloat16)
        self._received = torch.empty_like(self._sent)
        self._work: Pending | None = exchange_flat(self._received, self._sent, group, async_op=True)

    def wait(self) -> None:
        """Wait for the slices of all ranks and add them."""
        work, self._work = self._work, None
        if work is None:
            return
        work.wait()
        parts = self._received.view(-1, self._own.numel())
        total = self._own if self._own.dtype == torch.float32 else self._own.float()
        total.copy_(parts[0])
        for part in parts[1:]:
            total.add_(part)
        if total is not self._own:
            self._own.copy_(total)
        del self._sent, self._received


class RoundingNotice:
    """Warns, once, of gradients in bf16 that are rounded more than once per step.

    Args:
        config: Whether gradients are accumulated in bf16.
        mesh: Rank 0 warns.
    """

    def __init__(self, config: ZeroConfig, mesh: ParallelMesh) -> None:
        self._waits = config.grads == "bf16" and mesh.rank == 0

    def __call__(self, when: str) -> None:
        """Warn that gradients are rounded after ``when``."""
        if self._waits:
            self._waits = False
            warnings.warn(
                f"grads='bf16' rounds the accumulated gradients after {when}: small contributions "
                "to large sums are lost. grads='fp32' costs two bytes more per parameter.",
                UserWarning,
                stacklevel=4,
            )
