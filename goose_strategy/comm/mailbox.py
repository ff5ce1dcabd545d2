"""Messages between two CPU ranks on one machine, through shared memory.

The sender copies the payload into memory that the receiver has mapped and puts a packet with the
header on the socket between them; the receiver checks the header, copies the payload out, and
says so, which frees the memory. A send therefore never waits for its receiver, and every message
carries its header. Memory grows to what is under way at once and is used again afterwards. (The
socket holds some hundred packets; a sender that is further ahead than that does wait.)
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from goose_strategy.comm.message import (
    HEADER_NUMEL,
    Make,
    Metas,
    Note,
    check_header,
    decode,
    encode,
    metas_of,
    on_host,
)
from goose_strategy.errors import PeerError
from goose_strategy.mesh.host import HostPeers, limit_wait, map_memory

_PACKET = struct.Struct("cxxxIQ")  # kind, number of the area; its bytes, an offset, or a count
_AREA, _DATA, _TAKEN = b"A", b"D", b"T"
_HEADER_BYTES = 8 * HEADER_NUMEL
_PACKET_BYTES = _PACKET.size + _HEADER_BYTES
_ANCILLARY_BYTES = socket.CMSG_LEN(array("i").itemsize)
_FIRST_AREA_BYTES = 1 << 20
_ALIGNMENT = 64


@dataclass
class _Area:
    """A piece of the sender's memory: messages are put behind each other until it is empty."""

    number: int
    memory: Tensor
    used: int = 0
    under_way: int = 0

    def take(self, nbytes: int) -> int | None:
        """Return the offset of ``nbytes`` free bytes, or ``None`` if there are not as many."""
        if not self.under_way:
            self.used = 0
        if self.used + nbytes > self.memory.numel():
            return None
        offset = self.used
        self.used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.under_way += 1
        return offset


def mailbox_of(peer: int, peers: HostPeers) -> Mailbox:
    """Return the one mailbox that this process has for a neighbour of a group.

    Args:
        peer: The neighbour's position in the group.
        peers: The group as neighbours on this machine.
    """
    box: Mailbox | None = peers.mailboxes.get(peer)
    if box is None:
        box = peers.mailboxes[peer] = Mailbox(peer, peers)
    return box


class MailSend:
    """A message that was copied already."""

    def wait(self) -> None:
        """Return at once: the tensors may be written to again."""


_SENT = MailSend()


@dataclass
class MailReceive:
    """A message to come."""

    box: Mailbox
    key: Hashable
    expected: Metas | None
    note: Note
    make: Make = on_host
    tensors: tuple[Tensor, ...] | None = None

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the message and return its tensors; further calls return them again.

        Raises:
            PeerError: If the sender was lost or the deadline expired.
            ScheduleError: If the sender's message is another one than this side expects.
        """
        return self.box.finish(self)


class Mailbox:
    """This rank's end of the messages to and from one neighbour. Built by `mailbox_of`.

    Args:
        peer: The neighbour's position in the group.
        peers: The group as neighbours on this machine.
    """

    def __init__(self, peer: int, peers: HostPeers) -> None:
        self._link = peers.mail[peer]
        self._timeout_s = peers.timeout_s
        self._peers = peers
        self._peer_rank = peers.ranks[peer]
        self._rank = peers.ranks[peers.rank]
        self._areas: list[_Area] = []
        self._theirs: dict[int, Tensor] = {}
        self._owed: dict[int, int] = {}
        self._arrived: deque[tuple[int, int, bytes]] = deque()
        self._awaited: deque[MailReceive] = deque()
        self._headers: dict[tuple[Hashable, Metas], bytes] = {}
        self._read: dict[bytes, tuple[Metas, int]] = {}

    def limit_waits(self, seconds: float) -> None:
        """Let waits end after so many seconds instead of the group's timeout."""
        self._timeout_s = seconds
        limit_wait(self._link, seconds)

    def send(self, tensors: Sequence[Tensor], key: Hashable, note: Note) -> MailSend:
        """Copy contiguous tensors into shared memory and announce them."""
        metas = metas_of(tensors)
        # Models of one process share the mailbox, and may give one key to messages of other shapes.
        header = self._headers.get((key, metas))
        if header is None:
            header = self._headers[key, metas] = array("q", encode(metas, key)).tobytes()
        sizes = [-(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT for meta in metas]
        area, offset = self._room(sum(sizes))
        at = offset
        for tensor, size in zip(tensors, sizes, strict=True):
            note("send", tensor)
            if tensor.numel():
                nbytes = tensor.numel() * tensor.element_size()
                area.memory[at : at + nbytes].copy_(tensor.view(-1).view(torch.uint8))
            at += size
        self._put(_PACKET.pack(_DATA, area.number, offset) + header, f"to take {key!r}")
        return _SENT

    def receive(
        self, key: Hashable, expected: Metas | None, note: Note, make: Make | None = None
    ) -> MailReceive:
        """Say that the next message is awaited; nothing needs to be posted."""
        pending = MailReceive(self, key, expected, note, make or on_host)
        self._awaited.append(pending)
        return pending

    def flush(self) -> None:
        """Return at once: messages are copied when they are sent."""

    def finish(self, pending: MailReceive) -> tuple[Tensor, ...]:
        """Take messages in the order in which they were awaited, up to ``pending``."""
        while pending.tensors is None:
            first = self._awaited[0]
            while not self._arrived:
                self._listen(f"for {first.key!r}")
            first.tensors = self._take(first, *self._arrived.popleft())
            self._awaited.popleft()
        return pending.tensors

    def _take(
        self, pending: MailReceive, number: int, offset: int, header: bytes
    ) -> tuple[Tensor, ...]:
        """Check the header, copy the payload out and free its memory."""
        read = self._read.get(header)
        if read is None:
            read = self._read[header] = decode(array("q", header))
        metas = check_header(
            pending.key, read, pending.expected, sender=self._peer_rank, receiver=self._rank
        )
        tensors = []
        for meta in metas:
            tensor = pending.make(meta)
            nbytes = meta.nbytes
            if nbytes:
                memory = self._theirs[number][offset : offset + nbytes]
                tensor.view(-1).view(torch.uint8).copy_(memory)
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
            pending.note("receive", tensor)
            tensors.append(tensor)
        self._thank(number)
        return tuple(tensors)

    def _thank(self, number: int) -> None:
        """Say that a message was copied out. Never waits, and the neighbour may be gone."""
        owed = self._owed.get(number, 0) + 1
        try:
            self._link.send(_PACKET.pack(_TAKEN, number, owed), socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._owed[number] = owed  # with the next one
        except OSError:
            pass
        else:
            self._owed[number] = 0

    def _room(self, nbytes: int) -> tuple[_Area, int]:
        """Find free memory, after hearing what the receiver has taken meanwhile."""
        while self._listen(None):
            pass
        for area in self._areas:
            offset = area.take(nbytes)
            if offset is not None:
                return area, offset
        size = max([_FIRST_AREA_BYTES, nbytes, *(2 * a.memory.numel() for a in self._areas)])
        area = self._open_area(len(self._areas), size)
        return area, area.take(nbytes) or 0

    def _open_area(self, number: int, nbytes: int) -> _Area:
        """Make another area and hand it to the receiver."""
        descriptor = os.memfd_create("goose-mail", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, nbytes)
            area = _Area(number, map_memory(descriptor, nbytes))
            self._put(_PACKET.pack(_AREA, number, nbytes), "to map memory", [descriptor])
        finally:
            os.close(descriptor)
        self._areas.append(area)
        return area

    def _put(self, packet: bytes, purpose: str, descriptors: Sequence[int] = ()) -> None:
        """Put a packet on the socket, with descriptors beside it."""
        try:
            if descriptors:
                socket.send_fds(self._link, [packet], descriptors)
            else:
                self._link.send(packet)
        except OSError as err:
            raise self._lost(err, purpose) from err

    def _listen(self, purpose: str | None) -> bool:
        """Hear one packet: wait for it, or with ``purpose=None`` only look whether there is one.

        Returns:
            Whether there was one.
        """
        flags = 0 if purpose is not None else socket.MSG_DONTWAIT
        try:
            packet, ancillary = self._next_packet(flags)
        except OSError as err:
            if purpose is None:
                return False
            raise self._lost(err, purpose) from err
        kind, number, value = _PACKET.unpack_from(packet)
        if kind == _DATA:
            self._arrived.append((number, value, packet[_PACKET.size :]))
        elif kind == _TAKEN:
            self._areas[number].under_way -= value
        else:
            self._map(number, value, ancillary)
        return True

    def _next_packet(self, flags: int) -> tuple[bytes, Sequence[tuple[int, int, bytes]]]:
        # socket.recv_fds drops its flags (CPython 3.11), so the long way.
        try:
            packet, ancillary, _, _ = self._link.recvmsg(_PACKET_BYTES, _ANCILLARY_BYTES, flags)
        except ConnectionResetError:
            # A neighbour that closed without having heard all our thanks is reported once before
            # the packets that it sent, which are still there.
            packet, ancillary, _, _ = self._link.recvmsg(_PACKET_BYTES, _ANCILLARY_BYTES, flags)
        if not packet:
            raise ConnectionResetError("connection closed by peer")
        return packet, ancillary

    def _map(self, number: int, nbytes: int, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        """Map an area of the neighbour, whose descriptor came with the packet."""
        (descriptor,) = array("i", ancillary[0][2])
        try:
            self._theirs[number] = map_memory(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def _lost(self, err: OSError, purpose: str) -> PeerError:
        silent = isinstance(err, BlockingIOError)
        reason = f"silent for {self._timeout_s:g} s" if silent else f"gone: {err}"
        return PeerError(
            f"rank {self._rank} waited for rank {self._peer_rank} {purpose} on "
            f"{self._peers.name}, which is {reason}.",
            rank=self._rank,
        )
