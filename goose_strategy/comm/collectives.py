"""Every collective of goose-strategy, on an explicit group.

``torch.distributed`` takes ``group=None`` for "the whole world", renames its flat collectives from
one release to the next, and hands back ``None`` or a work depending on a flag. Here ``None`` is the
group of one rank, for which there is nothing to do; every call hands back something to wait for.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.comm.exchange import GatherByMessages, ScatterByExchange
from goose_strategy.comm.host import (
    Deferred,
    ReduceName,
    all_gather_host,
    all_reduce_host,
    barrier_host,
    broadcast_host,
    exchange_slices,
    reduce_scatter_host,
    run_deferred,
)
from goose_strategy.comm.recorder import ACTIVE, recording
from goose_strategy.comm.staged import (
    lane_of,
    staged_all_gather,
    staged_all_reduce,
    staged_broadcast,
    staged_exchange,
    staged_reduce_scatter,
)
from goose_strategy.mesh.host import PEERS, HostPeers
from goose_strategy.mesh.lane import LANES

__all__ = [
    "DONE",
    "Pending",
    "ReduceName",
    "all_gather_flat",
    "all_gather_objects",
    "all_gather_uneven",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "exchange_flat",
    "recording",
    "reduce_scatter_flat",
]

_T = TypeVar("_T")
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending(Protocol):
    """An operation under way; its tensors may not be touched before `wait` returned."""

    def wait(self) -> object:
        """Wait (on a device: make the current stream wait) until the operation is done."""


class _Done:
    """The operation that is over already."""

    def wait(self) -> None:
        """Return at once."""


DONE: Pending = _Done()
"""What a call returns that has nothing left to wait for."""

# torch 2.13 renamed the flat collectives and warns of the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(
    tensor: Tensor,
    group: ProcessGroup | None,
    *,
    op: ReduceName = "sum",
    async_op: bool = False,
) -> Pending:
    """Reduce ``tensor`` over the group, in place; every rank obtains the same bits.

    Args:
        tensor: Any shape, contiguous; the same shape and dtype on every rank.
        group: Ranks that take part; ``None`` for this rank alone.
        op: ``"sum"``, ``"max"`` or ``"min"``.
        async_op: Return before the result is there.

    Returns:
        What to wait for before ``tensor`` is used.
    """
    if group is None:
        return DONE
    if ACTIVE:
        _note(group, f"all_reduce {op}", tensor)
    lane = lane_of(group, tensor) if LANES else None
    if lane is not None:
        return _begun(staged_all_reduce(lane, tensor, group, op), async_op=async_op)
    peers = PEERS.get(group)
    if peers is not None:
        if async_op:
            return Deferred(peers, partial(all_reduce_host, peers, tensor, op))
        if peers.deferred:
            run_deferred(peers)
        all_reduce_host(peers, tensor, op)
        return DONE
    work = dist.all_reduce(tensor, _OPS[op], group=group, async_op=async_op)
    return work if work is not None else DONE


def all_gather_flat(
    output: Tensor, shard: Tensor, group: ProcessGroup | None, *, async_op: bool = False
) -> Pending:
    """Gather the shards of all ranks into ``output``, ordered by group rank.

    Args:
        output: ``[group size * n]``, contiguous.
        shard: ``[n]``, contiguous; may be this rank's slice of ``output``.
        group: Ranks that take part; ``None`` for this rank alone.
        async_op: Return before the result is there.

    Returns:
        What to wait for before ``output`` is used.
    """
    if group is None:
        if output.data_ptr() != shard.data_ptr():
            output.copy_(shard)
        return DONE
    if ACTIVE:
        _note(group, "all_gather", shard)
    lane = lane_of(group, output) if LANES else None
    if lane is not None:
        return _begun(staged_all_gather(lane, output, shard, group), async_op=async_op)
    peers = PEERS.get(group)
    if peers is not None:
        return _on_host(peers, partial(all_gather_host, peers, output, shard), async_op=async_op)
    if output.device.type == "cpu":
        return _begun(GatherByMessages(output, shard, group), async_op=async_op)
    work = _all_gather(output, shard, group=group, async_op=async_op)
    return work if work is not None else DONE


def all_gather_uneven(
    shard: Tensor, group: ProcessGroup | None, *, dim: int, sizes: Sequence[int]
) -> Tensor:
    """Concatenate the slices of all ranks along ``dim``; the slices may differ in length.

    Args:
        shard: This rank's slice, ``sizes[group rank]`` long along ``dim``.
        group: Ranks that hold the slices; ``None`` for this rank alone.
        dim: Dimension along which the slices lie.
        sizes: Length of every rank's slice.

    Returns:
        The whole tensor, contiguous, on every rank.
    """
    if group is None:
        return shard
    longest = max(sizes)
    # The slices travel dim-first and padded, because a backend gathers equal shapes only.
    padded = shard.new_zeros((longest, *shard.shape[:dim], *shard.shape[dim + 1 :]))
    padded[: shard.shape[dim]].copy_(shard.movedim(dim, 0))
    gathered = padded.new_empty((len(sizes), *padded.shape))
    all_gather_flat(gathered.view(-1), padded.view(-1), group)
    whole = shard.new_empty((*shard.shape[:dim], sum(sizes), *shard.shape[dim + 1 :]))
    for part, size, target in zip(gathered, sizes, whole.split(list(sizes), dim), strict=True):
        target.copy_(part[:size].movedim(0, dim))
    return whole


def reduce_scatter_flat(
    flat: Tensor, group: ProcessGroup | None, *, async_op: bool = False
) -> Pending:
    """Sum ``flat`` over the group; afterwards this rank's slice holds its part of the sum.

    Args:
        flat: ``[group size * n]``, contiguous. Slice ``[rank * n, (rank + 1) * n)`` becomes the
            sum; the other slices are unspecified afterwards.
        group: Ranks that take part; ``None`` for this rank alone.
        async_op: Return before the result is there.

    Returns:
        What to wait for before ``flat`` is used.
    """
    if group is None:
        return DONE
    if ACTIVE:
        _note(group, "reduce_scatter", flat)
    lane = lane_of(group, flat) if LANES else None
    if lane is not None:
        return _begun(staged_reduce_scatter(lane, flat, group), async_op=async_op)
    peers = PEERS.get(group)
    if peers is not None:
        return _on_host(peers, partial(reduce_scatter_host, peers, flat), async_op=async_op)
    if flat.device.type == "cpu":
        return _begun(ScatterByExchange(flat, group), async_op=async_op)
    own = flat.view(group.size(), -1)[group.rank()]
    work = _reduce_scatter(own, flat, group=group, async_op=async_op)
    return work if work is not None else DONE


def exchange_flat(
    received: Tensor, flat: Tensor, group: ProcessGroup | None, *, async_op: bool = False
) -> Pending:
    """Send slice ``i`` of ``flat`` to rank ``i`` of the group, and receive this rank's of everyone.

    Args:
        received: ``[group size * n]``, contiguous; slice ``i`` becomes what rank ``i`` sent.
        flat: ``[group size * n]``, contiguous; it may not be changed before the wait.
        group: Ranks that take part; ``None`` for this rank alone.
        async_op: Return before the result is there.

    Returns:
        What to wait for before ``received`` is used.
    """
    if group is None:
        received.copy_(flat)
        return DONE
    if ACTIVE:
        _note(group, "exchange", flat)
    lane = lane_of(group, flat) if LANES else None
    if lane is not None:
        return _begun(staged_exchange(lane, received, flat, group), async_op=async_op)
    peers = PEERS.get(group)
    if peers is not None:
        return _on_host(peers, partial(exchange_slices, peers, received, flat), async_op=async_op)
    work = dist.all_to_all_single(received, flat, group=group, async_op=async_op)
    return work if work is not None else DONE


def broadcast(
    tensor: Tensor, *, source: int, group: ProcessGroup | None, async_op: bool = False
) -> Pending:
    """Copy ``tensor`` of the global rank ``source`` to all ranks of the group, in place."""
    if group is None:
        return DONE
    if ACTIVE:
        _note(group, "broadcast", tensor, source)
    lane = lane_of(group, tensor) if LANES else None
    if lane is not None:
        return _begun(staged_broadcast(lane, tensor, group, source), async_op=async_op)
    peers = PEERS.get(group)
    if peers is not None:
        run = partial(broadcast_host, peers, tensor, peers.ranks.index(source))
        return _on_host(peers, run, async_op=async_op)
    work = dist.broadcast(tensor, source, group=group, async_op=async_op)
    return work if work is not None else DONE


def all_gather_objects(obj: _T, group: ProcessGroup | None) -> list[_T]:
    """Return the picklable ``obj`` of every rank, ordered by group rank."""
    if group is None:
        return [obj]
    peers = PEERS.get(group)
    if peers is None:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, obj, group=group)
        return gathered
    mine = _pickled(obj)
    lengths = mine.new_empty(group.size(), dtype=torch.int64)
    all_gather_flat(lengths, torch.tensor([mine.numel()]), group)
    padded = mine.new_zeros(int(lengths.max()))
    padded[: mine.numel()].copy_(mine)
    every = padded.new_empty(group.size(), padded.numel())
    all_gather_flat(every.view(-1), padded, group)
    return [_unpickled(row[:length]) for row, length in zip(every, lengths.tolist(), strict=True)]


def broadcast_object(obj: _T, *, source: int, group: ProcessGroup | None) -> _T:
    """Return the picklable ``obj`` of the global rank ``source``."""
    if group is None:
        return obj
    peers = PEERS.get(group)
    if peers is None:
        holder: list[Any] = [obj]
        dist.broadcast_object_list(holder, source, group=group)
        result: _T = holder[0]
        return result
    is_source = peers.ranks[peers.rank] == source
    sent = _pickled(obj) if is_source else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([sent.numel()])
    broadcast(length, source=source, group=group)
    received = sent if is_source else torch.empty(int(length), dtype=torch.uint8)
    broadcast(received, source=source, group=group)
    return obj if is_source else _unpickled(received)


def _begun(pending: Pending, *, async_op: bool) -> Pending:
    """Wait for an operation unless the caller will."""
    if async_op:
        return pending
    pending.wait()
    return DONE


def _on_host(peers: HostPeers, run: Callable[[], None], *, async_op: bool) -> Pending:
    """Run between neighbours on one machine, after what was launched before."""
    if async_op:
        return Deferred(peers, run)
    run_deferred(peers)
    run()
    return DONE


def _pickled(obj: object) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _note(group: ProcessGroup, op: str, tensor: Tensor, peer: int | None = None) -> None:
    for recorder in ACTIVE:
        recorder.note(group, op, tensor, peer)


def barrier(group: ProcessGroup | None) -> None:
    """Wait until all ranks of the group have come here."""
    if group is None:
        return
    peers = PEERS.get(group)
    if peers is not None:
        _on_host(peers, partial(barrier_host, peers), async_op=False)
    else:
        dist.barrier(group=group)
