"""Messages of tensors on a card, through the host's memory.

gloo carries no messages of a card's tensors. They are copied into pinned memory and sent as those
of a CPU are: through shared memory (``mailbox``) or through gloo (``wire``).

A send waits for its tensors to be computed and copied down, but for no other rank. Put off until
they are, it would leave when this rank comes to communicate the next time, and the receiver could
by then be what this rank waits for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from goose_strategy.comm.crossing import Crossing, shaped
from goose_strategy.comm.mailbox import Mailbox, MailReceive, MailSend

if TYPE_CHECKING:
    from goose_strategy.comm.message import Metas, Note, TensorMeta
    from goose_strategy.comm.wire import Wire, WireReceive, WireSend
    from goose_strategy.mesh.lane import Lane


class StagedSend:
    """A message that has left the device and is under way on the host."""

    def __init__(self, wire: StagedWire, crossing: Crossing, sent: WireSend | MailSend) -> None:
        self._wire = wire
        self._crossing = crossing
        self._sent: WireSend | MailSend | None = sent

    def wait(self) -> None:
        """Wait until the host's memory is free again; further calls return at once.

        Raises:
            PeerError: If the receiver was lost or the deadline expired.
        """
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.wait()
            self._crossing.release()
            self._wire.in_flight.discard(self)


class StagedReceive:
    """A message to come, received into pinned memory and copied up when it is waited for."""

    def __init__(self, lane: Lane, device: torch.device) -> None:
        self._lane = lane
        self._device = device
        self._buffers: list[Tensor] = []
        self._tensors: tuple[Tensor, ...] | None = None
        self.coming: WireReceive | MailReceive

    def make(self, meta: TensorMeta) -> Tensor:
        """Return the memory that a part of the message is received into."""
        self._buffers.append(self._lane.pool.take(meta.nbytes))
        return shaped(self._buffers[-1], meta)

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the message and return its tensors; further calls return them again.

        Raises:
            PeerError: If the sender was lost or the deadline expired.
            ScheduleError: If the sender's message is another one than this side expects.
        """
        if self._tensors is None:
            memories = self.coming.wait()
            tensors = tuple(m.new_empty(m.shape, device=self._device) for m in memories)
            # Behind what was launched until now: the allocator may have handed out memory that a
            # computation under way still reads.
            crossing = Crossing(self._lane, self._buffers)
            for memory, tensor in zip(memories, tensors, strict=True):
                crossing.expect(memory, tensor)
            crossing.deliver()
            crossing.join()
            self._tensors = tensors
        return self._tensors


class StagedWire:
    """This rank's end of the messages to and from one other rank, for tensors on a device.

    Args:
        wire: Carries the messages of the host's memory.
        lane: The device.
        device: Device on which received tensors are made.

    Attributes:
        in_flight: Sends that were not waited for yet.
    """

    def __init__(self, wire: Wire | Mailbox, lane: Lane, device: torch.device) -> None:
        self._wire = wire
        self._lane = lane
        self._device = device
        self.in_flight: set[StagedSend] = set()

    def send(self, tensors: Sequence[Tensor], key: Hashable, note: Note) -> StagedSend:
        """Start to send contiguous tensors; waits for them to be computed, for no other rank."""
        crossing = Crossing(self._lane)
        memories = [crossing.like(tensor) for tensor in tensors]
        for memory, tensor in zip(memories, tensors, strict=True):
            crossing.fetch(tensor, memory)
        crossing.arrive()
        pending = StagedSend(self, crossing, self._wire.send(memories, key, note))
        if isinstance(self._wire, Mailbox):
            pending.wait()  # copied already
        else:
            self.in_flight.add(pending)
        return pending

    def receive(self, key: Hashable, expected: Metas | None, note: Note) -> StagedReceive:
        """Post the receive of the next message, as early as its shapes are known."""
        pending = StagedReceive(self._lane, self._device)
        pending.coming = self._wire.receive(key, expected, note, pending.make)
        return pending

    def flush(self) -> None:
        """Wait for all sends that were not waited for yet."""
        for pending in list(self.in_flight):
            pending.wait()
