"""Shared memory and sockets between ranks of one group that run on one machine.

gloo sends tensors of neighbouring CPU ranks through TCP on the loopback device: two copies in the
kernel for each, and threads that wake each other. Ranks on one machine can read each other's memory
instead. This module only opens the way: for each group whose members all share a machine, one
outbox per rank (anonymous memory that the others map) and one socket per pair (to say "it is there"
and to notice that a rank is gone). What travels is the business of ``comm``.

Nothing is left behind, whatever happens: the memory is a ``memfd``, the sockets are in the abstract
namespace, and both end with the processes. Where any of it is missing (another platform, ranks
in different containers), all ranks agree to stay with the backend.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

HALF_BYTES = 2 << 20
"""Size of one half of an outbox. Measured, see ``comm.host``."""

_SECRET_BYTES = 16
_HELLO = struct.Struct(f"{_SECRET_BYTES}sHBI")  # secret, group, channel, global rank
_COLLECTIVE, _MESSAGE = 0, 1


class HostPeers:
    """The members of one group as neighbours on this machine.

    Attributes:
        name: What the group is for, for messages.
        rank: This rank's position in the group.
        ranks: Global rank of each member.
        timeout_s: How long a wait for a neighbour may last.
        sockets: For collectives: ``(group rank, socket)`` of every other member.
        mail: For messages: socket to each other member, by group rank.
        mailboxes: What ``comm`` keeps for each of those sockets.
        turn: Which half of the outbox the next piece uses.
        deferred: Collectives that were launched and have not run yet, oldest first.
    """

    def __init__(self, name: str, ranks: Sequence[int], me: int, timeout_s: float) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(me)
        self.timeout_s = timeout_s
        self.sockets: list[tuple[int, socket.socket]] = []
        self.mail: dict[int, socket.socket] = {}
        self.mailboxes: dict[int, Any] = {}
        self.turn = 0
        self.deferred: deque[Callable[[], None]] = deque()
        self._boxes: list[Tensor] = []
        self._views: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def boxes(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the current half of every member's outbox as elements of ``dtype``, and turn.

        A half may be written again as soon as its user has heard from everybody in the turn after
        it: a rank speaks there only once it has read this half.
        """
        views = self._views.get(dtype)
        if views is None:
            # Not in a caller's inference mode: nobody outside of it could write to such views.
            with torch.inference_mode(mode=False):
                first = [box[:HALF_BYTES].view(dtype) for box in self._boxes]
                second = [box[HALF_BYTES:].view(dtype) for box in self._boxes]
            views = self._views[dtype] = (first, second)
        half = views[self.turn]
        self.turn ^= 1
        return half

    def attach(self, boxes: Sequence[Tensor]) -> None:
        """Take the outboxes of all members, by group rank."""
        self._boxes = list(boxes)

    def close(self) -> None:
        """Close the sockets and let go of the memory."""
        for _, channel in self.sockets:
            channel.close()
        for channel in self.mail.values():
            channel.close()
        self.sockets, self.mail, self._boxes = [], {}, []
        self._views.clear()
        self.deferred.clear()
        self.mailboxes.clear()


PEERS: dict[ProcessGroup, HostPeers] = {}
"""The groups of this process whose members share a machine. ``comm`` asks it at every launch."""


class _Address(NamedTuple):
    """Where a rank listens, and what makes two ranks neighbours."""

    machine: tuple[str, ...]
    name: str
    secret: bytes


def connect_host(
    groups: Mapping[str, ProcessGroup | None], *, control: ProcessGroup, timeout: timedelta
) -> dict[ProcessGroup, HostPeers]:
    """Connect the members of every group that lies on one machine; collective over the world.

    Args:
        groups: The groups of this rank by purpose, the same purposes in the same order on all
            ranks.
        control: The gloo group over the world.
        timeout: How long a later wait for a neighbour may last.

    Returns:
        What was connected and registered in `PEERS`; nothing if any rank failed to.
    """
    rank = dist.get_rank()
    listener = _listen()
    mine = _Address(
        machine=_machine(),
        name=listener.getsockname().decode() if listener is not None else "",
        secret=secrets.token_bytes(_SECRET_BYTES),
    )
    addresses: list[_Address] = [mine] * control.size()
    dist.all_gather_object(addresses, mine, group=control)
    local: dict[str, HostPeers] = {}
    for name, group in groups.items():
        ranks = dist.get_process_group_ranks(group) if group is not None else [rank]
        machines = {addresses[member].machine for member in ranks}
        if len(ranks) > 1 and len(machines) == 1 and all(mine.machine):
            local[name] = HostPeers(name, ranks, rank, timeout.total_seconds())
    works = True
    try:
        if local and listener is not None:
            _meet(local, list(groups), addresses, rank, listener)
    except OSError:
        works = False
        _close_all(local)  # so that neighbours do not wait for this rank
    finally:
        if listener is not None:
            listener.close()
    verdict = torch.tensor([int(works)])
    dist.all_reduce(verdict, dist.ReduceOp.MIN, group=control)
    if not verdict.item():
        _close_all(local)
        return {}
    named = ((groups[name], peers) for name, peers in local.items())
    connected = {group: peers for group, peers in named if group is not None}
    PEERS.update(connected)
    return connected


def disconnect_host(connected: Mapping[ProcessGroup, HostPeers]) -> None:
    """Close and forget what `connect_host` connected."""
    for group, peers in connected.items():
        peers.close()
        if PEERS.get(group) is peers:
            del PEERS[group]


def _close_all(local: Mapping[str, HostPeers]) -> None:
    for peers in local.values():
        peers.close()


def _machine() -> tuple[str, ...]:
    """Return what two ranks must have in common to share sockets and memory; empty parts: none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = str(Path("/proc/self/ns/net").stat().st_ino)
    except OSError:
        return ("", "", "")
    usable = hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")
    return (boot if usable else "", network, str(os.getuid()))


def _listen() -> socket.socket | None:
    """Listen under a random name in the abstract namespace."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0goose-{secrets.token_hex(16)}")
        listener.listen(4096)
    except (OSError, AttributeError):
        return None
    return listener


def _meet(
    local: Mapping[str, HostPeers],
    purposes: Sequence[str],
    addresses: Sequence[_Address],
    rank: int,
    listener: socket.socket,
) -> None:
    """Connect every pair (the higher rank calls the lower one), then swap outboxes."""
    patience_s = 20.0
    expected = 0
    for name, peers in local.items():
        for at, other in enumerate(peers.ranks):
            for channel in _channels(name):
                if other < rank:
                    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    link.connect(addresses[other].name)
                    secret = addresses[other].secret
                    link.send(_HELLO.pack(secret, purposes.index(name), channel, rank))
                    _add(peers, at, channel, link)
                elif other > rank:
                    expected += 1
    listener.settimeout(patience_s)
    while expected:
        link, _ = listener.accept()
        link.settimeout(patience_s)
        secret, purpose, channel, other = _HELLO.unpack(link.recv(_HELLO.size))
        if secret != addresses[rank].secret:
            link.close()
            continue
        peers = local[purposes[purpose]]
        _add(peers, peers.ranks.index(other), channel, link)
        expected -= 1
    for peers in local.values():
        peers.sockets.sort(key=lambda entry: entry[0])
        _swap_boxes(peers)


def _channels(name: str) -> tuple[int, ...]:
    """Return the kinds of sockets that a group needs: the pipeline's groups carry messages."""
    return (_COLLECTIVE, _MESSAGE) if name.startswith("pp_") else (_COLLECTIVE,)


def limit_wait(link: socket.socket, seconds: float) -> None:
    """Let a receive on ``link`` fail with ``BlockingIOError`` after so many seconds.

    A limit in the kernel: Python's own timeout would cost a ``poll`` for each packet.
    """
    link.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _add(peers: HostPeers, at: int, channel: int, link: socket.socket) -> None:
    limit_wait(link, peers.timeout_s)
    if channel == _MESSAGE:
        # Room for many packets, as far as the kernel allows.
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
        peers.mail[at] = link
    else:
        peers.sockets.append((at, link))


def _swap_boxes(peers: HostPeers) -> None:
    """Make this rank's outbox and map those of the others."""
    boxes: dict[int, Tensor] = {}
    mine = os.memfd_create("goose-outbox", os.MFD_CLOEXEC)
    try:
        os.ftruncate(mine, 2 * HALF_BYTES)
        boxes[peers.rank] = map_memory(mine, 2 * HALF_BYTES)
        for _, link in peers.sockets:
            socket.send_fds(link, [b"box"], [mine])
        for at, link in peers.sockets:
            _, fds, _, _ = socket.recv_fds(link, 3, 1)
            if not fds:
                raise ConnectionError(f"no outbox came from rank {peers.ranks[at]}")
            try:
                boxes[at] = map_memory(fds[0], 2 * HALF_BYTES)
            finally:
                os.close(fds[0])
    finally:
        os.close(mine)
    peers.attach([boxes[at] for at in range(peers.size)])


def map_memory(descriptor: int, nbytes: int) -> Tensor:
    """Map shared memory as bytes; unmapped when the last tensor on it is gone."""
    with torch.inference_mode(mode=False):
        return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
