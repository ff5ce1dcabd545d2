"""Collectives between CPU ranks on one machine, through shared memory.

Each rank writes its part into its outbox, says so to its neighbours, and reads theirs; the outbox
has two halves in turn, so that one word per neighbour and piece is all the synchronisation there
is. Sums are taken in rank order on every rank (in fp32 for 16-bit types), so all ranks obtain the
same bits, and a reduce-scatter the same as an all-reduce. The word names the operation, so ranks
that launch different ones get an error that names both, where gloo aborts the process.

An asynchronous operation runs when it is waited for, or before the next operation of its group:
always in the order of the launches. With threads it would compete with the training threads for
the cores; here it costs no memory and no context switch.

Measured with torch 2.13 on 2 cores (1 MiB of L2 each) for all ranks and other work, fp32, variants
in turn in one run, median wall / CPU ms of all ranks together:

================  ==============  =============  ==============  =============
                  2 ranks                        4 ranks
----------------  -----------------------------  -----------------------------
all-reduce        here            gloo           here            gloo
================  ==============  =============  ==============  =============
64 KiB            0.05 / 0.06     1.3 / 1.5      0.20 / 0.24     3.5 / 4.8
512 KiB           0.09 / 0.14     1.5 / 2.0      0.39 / 0.51     3.6 / 5.0
2 MiB             0.23 / 0.42     1.7 / 2.1      1.1 / 1.4       4.1 / 6.7
8 MiB             1.4 / 2.3       6.6 / 8.3      5.1 / 6.7       14 / 21
----------------  --------------  -------------  --------------  -------------
reduce-scatter
----------------  --------------  -------------  --------------  -------------
1 MiB             0.12 / 0.15     1.6 / 1.9      0.51 / 0.59     4.3 / 6.3
16 MiB            1.5 / 2.6       20 / 24        6.3 / 8.1       31 / 51
40 MiB            3.8 / 5.5       51 / 83        18 / 19         130 / 159
----------------  --------------  -------------  --------------  -------------
all-gather
----------------  --------------  -------------  --------------  -------------
1 MiB             0.09 / 0.14     0.87 / 1.1     0.30 / 0.38     2.9 / 4.1
16 MiB            1.7 / 2.6       8.4 / 12       3.5 / 5.0       17 / 27
40 MiB            3.6 / 5.5       38 / 58        11 / 11         100 / 117
================  ==============  =============  ==============  =============

Halves of 0.5, 1, 2 and 4 MiB were tried: 2 MiB takes most activations in one piece and is within
15 % of the best elsewhere. From 4 ranks and 1 MiB on an all-reduce by shares (reduce-scatter, then
all-gather) is 16 % cheaper than each rank reading everything; below, and for 2 ranks, it is up to
twice as dear. The rule depends on the group's size and the tensor's bytes alone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from goose_strategy.errors import MeshError, PeerError
from goose_strategy.mesh.host import HALF_BYTES, HostPeers

ReduceName: TypeAlias = Literal["sum", "max", "min"]
_Combine: TypeAlias = Callable[..., Tensor]

_WORD = struct.Struct("12s12sQ")  # operation, dtype, elements
_COMBINE: dict[str, _Combine] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
HALVED = (torch.bfloat16, torch.float16)
"""Types that are summed in fp32, by both CPU transports."""
# From so many bytes on it is cheaper that each rank sums a share and the others copy it.
_SHARES_BYTES = {2: 1 << 62, 3: 1 << 62, 4: (1 << 20) + 1}
_SHARES_BYTES_MORE_RANKS = 1 << 16


class Deferred:
    """An operation that was launched and runs when it is waited for."""

    def __init__(self, peers: HostPeers, action: Callable[[], None]) -> None:
        self._peers = peers
        self._action: Callable[[], None] | None = action
        peers.deferred.append(self.run)

    def run(self) -> None:
        """Run now, unless it ran already."""
        action, self._action = self._action, None
        if action is not None:
            action()

    def wait(self) -> None:
        """Run what was launched on this group before it, then this one."""
        while self._action is not None:
            if not self._peers.deferred:
                raise MeshError(f"the mesh was closed before an operation on {self._peers.name}.")
            self._peers.deferred.popleft()()


def run_deferred(peers: HostPeers) -> None:
    """Run all operations of the group that were launched and not waited for."""
    while peers.deferred:
        peers.deferred.popleft()()


def all_reduce_host(peers: HostPeers, tensor: Tensor, op: ReduceName) -> None:
    """Reduce ``tensor`` over the neighbours, in place."""
    flat = tensor.detach().view(-1)
    step = HALF_BYTES // flat.element_size()
    numel = flat.numel()
    threshold = _SHARES_BYTES.get(peers.size, _SHARES_BYTES_MORE_RANKS)
    if op == "sum" and numel * flat.element_size() >= threshold:
        _reduce_by_shares(peers, flat)
        return
    if numel <= step:
        _reduce_piece(peers, flat, op)
        return
    for start in range(0, numel, step):
        _reduce_piece(peers, flat[start : start + step], op)


def _reduce_piece(peers: HostPeers, piece: Tensor, op: ReduceName) -> None:
    numel = piece.numel()
    boxes = peers.boxes(piece.dtype)
    boxes[peers.rank][:numel].copy_(piece)
    exchange(peers, f"reduce {op}", piece.dtype, numel)
    combine = _COMBINE[op]
    if piece.dtype in HALVED:
        total = boxes[0][:numel].float()
        for box in boxes[1:]:
            combine(total, box[:numel], out=total)
        piece.copy_(total)
        return
    combine(boxes[0][:numel], boxes[1][:numel], out=piece)
    for box in boxes[2:]:
        combine(piece, box[:numel], out=piece)


def _reduce_by_shares(peers: HostPeers, flat: Tensor) -> None:
    """Each rank sums one share of the elements, and all copy the shares."""
    share = flat.numel() // peers.size
    even = flat[: share * peers.size]
    reduce_scatter_host(peers, even)
    mine = even[peers.rank * share : (peers.rank + 1) * share]
    all_gather_host(peers, even, mine)
    if even.numel() < flat.numel():
        _reduce_piece(peers, flat[even.numel() :], "sum")


def reduce_scatter_host(peers: HostPeers, flat: Tensor) -> None:
    """Sum ``flat`` over the neighbours into this rank's slice of it."""
    flat = flat.detach()
    width = flat.numel() // peers.size
    step = HALF_BYTES // flat.element_size() // peers.size
    slices = flat.view(peers.size, width)
    for start in range(0, width, step):
        _scatter_piece(peers, slices[:, start : start + step])


def _scatter_piece(peers: HostPeers, piece: Tensor) -> None:
    """Sum one range of every slice; ``piece`` is ``[size, range]`` of this rank's tensor."""
    width = piece.shape[1]
    me = peers.rank
    boxes = [box[: peers.size * width].view(peers.size, width) for box in peers.boxes(piece.dtype)]
    for other in range(peers.size):
        if other != me:
            boxes[me][other].copy_(piece[other])
    exchange(peers, "scatter sum", piece.dtype, width)
    own = piece[me]
    parts = [own if other == me else box[me] for other, box in enumerate(boxes)]
    if piece.dtype in HALVED:
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        own.copy_(total)
        return
    if me > 1:
        # Rank order, with the unused slice of the own outbox as scratch until it is our turn.
        scratch = torch.add(parts[0], parts[1], out=boxes[me][me])
        for part in parts[2:me]:
            scratch.add_(part)
        own.add_(scratch)
    else:
        own.add_(parts[1 - me])
    for part in parts[max(me, 1) + 1 :]:
        own.add_(part)


def all_gather_host(peers: HostPeers, output: Tensor, shard: Tensor) -> None:
    """Copy the shards of all neighbours into ``output``, ordered by rank."""
    output, shard = output.detach(), shard.detach()
    width = shard.numel()
    slices = output.view(peers.size, width)
    step = HALF_BYTES // shard.element_size()
    own = slices[peers.rank]
    if own.data_ptr() != shard.data_ptr():
        own.copy_(shard)
    for start in range(0, width, step):
        piece = slices[:, start : start + step]
        numel = piece.shape[1]
        boxes = peers.boxes(shard.dtype)
        boxes[peers.rank][:numel].copy_(piece[peers.rank])
        exchange(peers, "gather", shard.dtype, numel)
        for other in range(peers.size):
            if other != peers.rank:
                piece[other].copy_(boxes[other][:numel])


def exchange_slices(peers: HostPeers, received: Tensor, flat: Tensor) -> None:
    """Copy this rank's slice of every neighbour's tensor into ``received``, ordered by rank."""
    flat, received = flat.detach(), received.detach()
    width = flat.numel() // peers.size
    step = HALF_BYTES // flat.element_size() // peers.size
    sent, slices, me = flat.view(peers.size, width), received.view(peers.size, width), peers.rank
    for start in range(0, width, step):
        piece, place = sent[:, start : start + step], slices[:, start : start + step]
        shape = piece.shape
        boxes = [box[: piece.numel()].view(shape) for box in peers.boxes(flat.dtype)]
        boxes[me].copy_(piece)
        exchange(peers, "exchange", flat.dtype, shape[1])
        for other, box in enumerate(boxes):
            place[other].copy_(piece[me] if other == me else box[me])


def broadcast_host(peers: HostPeers, tensor: Tensor, source: int) -> None:
    """Copy ``tensor`` of the neighbour at group rank ``source`` to all, in place."""
    flat = tensor.detach().view(-1)
    step = HALF_BYTES // flat.element_size()
    for start in range(0, max(flat.numel(), 1), step):
        piece = flat[start : start + step]
        box = peers.boxes(flat.dtype)[source][: piece.numel()]
        if peers.rank == source:
            box.copy_(piece)
        exchange(peers, f"copy {source}", flat.dtype, piece.numel())
        if peers.rank != source:
            piece.copy_(box)


def barrier_host(peers: HostPeers) -> None:
    """Wait until all neighbours have come here."""
    exchange(peers, "barrier", torch.uint8, 0)


def exchange(peers: HostPeers, operation: str, dtype: torch.dtype, numel: int) -> None:
    """Say to all neighbours that the outbox is filled, and hear the same from each.

    Raises:
        PeerError: If a neighbour is gone, or silent for longer than the group's timeout.
        MeshError: If a neighbour launched another operation.
    """
    word = _WORD.pack(operation.encode(), str(dtype).encode()[6:18], numel)
    at = peers.rank
    try:
        for neighbour in peers.sockets:
            at = neighbour[0]
            neighbour[1].send(word)
        for neighbour in peers.sockets:
            at = neighbour[0]
            heard = neighbour[1].recv(64)
            if heard != word:
                _misheard(peers, at, word, heard)
    except OSError as err:
        silent = isinstance(err, BlockingIOError)
        reason = f"silent for {peers.timeout_s:g} s" if silent else f"gone ({err.strerror or err})"
        raise PeerError(
            f"rank {peers.ranks[peers.rank]} waited in {operation!r} on {peers.name} for rank "
            f"{peers.ranks[at]}, which is {reason}.",
            rank=peers.ranks[peers.rank],
        ) from err


def _misheard(peers: HostPeers, at: int, word: bytes, heard: bytes) -> None:
    """Raise for an answer that is not the own word."""
    if not heard:
        raise ConnectionResetError("connection closed by peer")
    raise MeshError(
        f"rank {peers.ranks[peers.rank]} launched {_read(word)} on {peers.name} but rank "
        f"{peers.ranks[at]} launched {_read(heard)}; all ranks of a group must launch the same "
        "operations in the same order.",
        rank=peers.ranks[peers.rank],
    )


def _read(word: bytes) -> str:
    operation, dtype, numel = _WORD.unpack(word)
    name = operation.rstrip(b"\0").decode()
    return f"{name!r} of {numel} {dtype.rstrip(bytes(1)).decode()}"
