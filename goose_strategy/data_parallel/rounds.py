"""Rounds: each bucket is summed over dp exactly once, in index order, on every rank.

A round begins in the hooks of a backward and ends with `Rounds.finish`, which also tells every
rank which parameters anybody used. ``DistributedDataParallel`` has that bitmap only with
``find_unused_parameters=True`` and then walks the graph; here it is one small message, and a rank
that used all its parameters does not read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.grads.buffer import GradSlot, GradState
from goose_strategy.grads.ready import ReadyCounter

if TYPE_CHECKING:
    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.mesh.mesh import ParallelMesh


class Rounds:
    """Launches the buckets' sums.

    Attributes:
        buckets: All buckets of this rank, in launch order.
        ready: The counter that the hooks mark.
    """

    def __init__(self, mesh: ParallelMesh, buckets: list[Bucket]) -> None:
        self._mesh = mesh
        self.buckets: list[Bucket] = []
        self.ready = ReadyCounter([], launch=self._launch, idle=self._idle)
        self._used = torch.ones(0, dtype=torch.int64)
        self.set_buckets(buckets)

    def set_buckets(self, buckets: list[Bucket]) -> None:
        """Replace the buckets; the hooks have to be installed anew, with the new counter."""
        self.buckets = buckets
        for index, bucket in enumerate(buckets):
            bucket.index = index
        self.ready = ReadyCounter(
            [None if bucket.key.late else len(bucket.slots) for bucket in buckets],
            launch=self._launch,
            idle=self._idle,
        )
        count = sum(len(bucket.slots) for bucket in buckets)
        self._used = torch.ones(count, dtype=torch.int64, device=self._mesh.device)

    @property
    def unfinished(self) -> bool:
        """Whether some gradient is this rank's own still."""
        return self.ready.dirty or any(b.grads.state is GradState.LOCAL for b in self.buckets)

    def _launch(self, index: int) -> None:
        self.buckets[index].reduce()

    def _idle(self, index: int) -> bool:
        return self.buckets[index].idle()

    def finish(self) -> None:
        """Launch what is left, tell who used what, and begin the next round. Collective."""
        self.ready.flush()
        self._exchange_used()
        self.ready.begin_round()

    def _exchange_used(self) -> None:
        """Attach the gradient of parameters that only other replicas used."""
        if self._mesh.dp is None or not self.buckets:
            return
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        absent = [i for i, slot in enumerate(slots) if slot.param.grad is None]
        # All ones stay all ones under max, so a rank that used everything reuses one tensor.
        used = self._used
        if absent:
            used = used.clone()
            used[absent] = 0
        # Every rank waits, or one that goes on to another communicator could wait there for one
        # that waits here. On a device that is the stream's affair, not the host's.
        all_reduce(used, self._mesh.dp, op="max")
        waiting = [i for i in absent if slots[i].param.requires_grad]
        if waiting:
            self._attach_used(used, slots, waiting)

    def _attach_used(self, used: Tensor, slots: list[GradSlot], waiting: list[int]) -> None:
        for index, flag in zip(waiting, used[waiting].tolist(), strict=True):
            if flag:
                slots[index].param.grad = slots[index].view
