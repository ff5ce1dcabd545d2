"""Collectives of tensors on a card, through the host's memory.

gloo has no reduce-scatter and no exchange of a card's tensors, and NCCL refuses a second rank on a
card. Here a tensor is copied into pinned memory, travels as any tensor of a CPU does (in shared
memory or through gloo), and is copied back: so several ranks run on one card, with the streams,
events and late copies that ranks on several cards have, and with the sums of the CPU: on one
machine in rank order, the same bits in every run.

In shared memory, an asynchronous operation runs at its `wait` or before the next one of its group
(see ``host``), and the host waits for the copy down only then. Over gloo it runs beside the host's
work, so the host waits at the launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.comm.crossing import Crossing
from goose_strategy.comm.exchange import GatherByMessages, ScatterByExchange
from goose_strategy.comm.host import (
    Deferred,
    ReduceName,
    all_gather_host,
    all_reduce_host,
    broadcast_host,
    exchange_slices,
    reduce_scatter_host,
)
from goose_strategy.mesh.host import PEERS, HostPeers
from goose_strategy.mesh.lane import LANES, Lane


class _Waitable(Protocol):
    def wait(self) -> object:
        """Wait until it is done."""


def lane_of(group: ProcessGroup, tensor: Tensor) -> Lane | None:
    """Return the way to the host that ``tensor`` has to take in ``group``, if any."""
    lane = LANES.get(group)
    return lane if lane is not None and lane.takes(tensor) else None


class StagedWork:
    """A collective of tensors on a device, under way.

    Args:
        crossing: Its tensors; what goes down is on its way.
        group: Ranks that take part.
        in_memory: Runs the operation between neighbours on one machine.
        by_gloo: Starts it through gloo.
    """

    def __init__(
        self,
        crossing: Crossing,
        group: ProcessGroup,
        *,
        in_memory: Callable[[HostPeers], None],
        by_gloo: Callable[[], _Waitable | None],
    ) -> None:
        self._crossing = crossing
        self._over = False
        peers = PEERS.get(group)
        self._work: _Waitable | None
        if peers is not None:
            self._work = Deferred(peers, partial(self._run, in_memory, peers))
        else:
            crossing.arrive()
            self._work = by_gloo()

    def _run(self, in_memory: Callable[[HostPeers], None], peers: HostPeers) -> None:
        self._crossing.arrive()
        in_memory(peers)
        self._finish()

    def _finish(self) -> None:
        if not self._over:
            self._over = True
            self._crossing.deliver()

    def wait(self) -> None:
        """Wait on the host for the operation, and let the computing stream wait for its result."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self._finish()
        self._crossing.join()


def staged_all_reduce(
    lane: Lane, tensor: Tensor, group: ProcessGroup, op: ReduceName
) -> StagedWork:
    """Reduce ``tensor`` over the group, in place. See `collectives.all_reduce`."""
    crossing, flat = Crossing(lane), tensor.detach().view(-1)
    memory = crossing.like(flat)
    crossing.fetch(flat, memory)
    crossing.expect(memory, flat)
    reduce_op = getattr(dist.ReduceOp, op.upper())
    return StagedWork(
        crossing,
        group,
        in_memory=lambda peers: all_reduce_host(peers, memory, op),
        by_gloo=lambda: dist.all_reduce(memory, reduce_op, group=group, async_op=True),
    )


def staged_all_gather(lane: Lane, output: Tensor, shard: Tensor, group: ProcessGroup) -> StagedWork:
    """Gather the shards of all ranks. See `collectives.all_gather_flat`."""
    crossing, output = Crossing(lane), output.detach()
    memory = crossing.like(output)
    mine = memory.view(group.size(), -1)[group.rank()]
    crossing.fetch(shard.detach(), mine)
    crossing.expect(memory, output)
    return StagedWork(
        crossing,
        group,
        in_memory=lambda peers: all_gather_host(peers, memory, mine),
        by_gloo=lambda: GatherByMessages(memory, mine, group),
    )


def staged_reduce_scatter(lane: Lane, flat: Tensor, group: ProcessGroup) -> StagedWork:
    """Sum ``flat`` into this rank's slice of it. See `collectives.reduce_scatter_flat`."""
    crossing, flat = Crossing(lane), flat.detach()
    memory = crossing.like(flat)
    crossing.fetch(flat, memory)
    mine, own = (whole.view(group.size(), -1)[group.rank()] for whole in (memory, flat))
    crossing.expect(mine, own)
    return StagedWork(
        crossing,
        group,
        in_memory=lambda peers: reduce_scatter_host(peers, memory),
        by_gloo=lambda: ScatterByExchange(memory, group),
    )


def staged_exchange(lane: Lane, received: Tensor, flat: Tensor, group: ProcessGroup) -> StagedWork:
    """Exchange slices with every rank. See `collectives.exchange_flat`."""
    crossing, received, flat = Crossing(lane), received.detach(), flat.detach()
    sent, memory = crossing.like(flat), crossing.like(received)
    crossing.fetch(flat, sent)
    crossing.expect(memory, received)
    return StagedWork(
        crossing,
        group,
        in_memory=lambda peers: exchange_slices(peers, memory, sent),
        by_gloo=lambda: dist.all_to_all_single(memory, sent, group=group, async_op=True),
    )


def staged_broadcast(lane: Lane, tensor: Tensor, group: ProcessGroup, source: int) -> StagedWork:
    """Copy ``tensor`` of the global rank ``source``. See `collectives.broadcast`."""
    crossing, flat = Crossing(lane), tensor.detach().view(-1)
    memory = crossing.like(flat)
    at = dist.get_group_rank(group, source)
    if group.rank() == at:
        crossing.fetch(flat, memory)
    else:
        crossing.expect(memory, flat)
    return StagedWork(
        crossing,
        group,
        in_memory=lambda peers: broadcast_host(peers, memory, at),
        by_gloo=lambda: dist.broadcast(memory, source, group=group, async_op=True),
    )
