"""Tensors of a card on their way through pinned memory: which copy waits for what.

A card works through its streams by itself, so a host that reads what a card computes, or writes
what it reads, is early or late unless it waits, and sees stale numbers without any error.
Everything that needs such an order between a card and its host is here; ``staged`` and
``staged_wire`` only say what happens on the host in between.

Order is kept by events alone; nothing waits for the whole device:

1. *launch*: a copy down, behind all that the computing stream has been given so far;
2. the host waits for that copy, and for nothing else, before it reads;
3. a copy up, also behind what the computing stream had been given at the launch, because that may
   still read the tensor;
4. *wait*: the computing stream waits for the copy up. The host does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from goose_strategy.comm.message import TensorMeta

if TYPE_CHECKING:
    from goose_strategy.mesh.lane import Event, Lane


class Crossing:
    """Tensors on their way to the host or back, and the memory they lie in meanwhile.

    It is made when the operation is launched, and holds every tensor until its copies are over:
    the allocator of the device would give freed memory to the next computation at once.

    Args:
        lane: The device.
        buffers: Pinned memory that is given back with its own.
    """

    def __init__(self, lane: Lane, buffers: Sequence[Tensor] = ()) -> None:
        self._lane = lane
        self._launched = lane.record(lane.current())
        self._buffers = list(buffers)
        self._sources: list[Tensor] = []
        self._targets: list[tuple[Tensor, Tensor]] = []
        self._is_down: Event | None = None
        self._is_up: Event | None = None

    def like(self, tensor: Tensor) -> Tensor:
        """Return pinned memory of the shape and type of ``tensor``, contiguous."""
        meta = TensorMeta(tuple(tensor.shape), tensor.dtype)
        buffer = self._lane.pool.take(meta.nbytes)
        self._buffers.append(buffer)
        return shaped(buffer, meta)

    def fetch(self, tensor: Tensor, memory: Tensor) -> None:
        """Start to copy ``tensor`` down, behind what was launched before this crossing."""
        lane = self._lane
        lane.down.wait_event(self._launched)
        lane.copy(memory, tensor, lane.down)
        self._sources.append(tensor)
        self._is_down = lane.record(lane.down)

    def arrive(self) -> None:
        """Let the host wait until all is down."""
        if self._is_down is not None:
            self._is_down.synchronize()
        self._sources.clear()

    def expect(self, memory: Tensor, tensor: Tensor) -> None:
        """Name what `deliver` will copy up, and where to."""
        self._targets.append((memory, tensor))

    def deliver(self) -> None:
        """Start to copy up all that is expected."""
        lane = self._lane
        if self._targets:
            lane.up.wait_event(self._launched)
            for memory, tensor in self._targets:
                lane.copy(tensor, memory, lane.up)
            self._is_up = lane.record(lane.up)
        self.release()

    def release(self) -> None:
        """Give the memory back, to be used again when the last copy is over."""
        buffers, self._buffers = self._buffers, []
        for buffer in buffers:
            self._lane.pool.give(buffer, self._is_up)

    def join(self) -> None:
        """Let the computing stream wait until all is up."""
        if self._is_up is not None:
            self._lane.current().wait_event(self._is_up)
        self._targets.clear()


def shaped(buffer: Tensor, meta: TensorMeta) -> Tensor:
    """Return the first bytes of ``buffer`` as a contiguous tensor of this shape and type."""
    return buffer[: meta.nbytes].view(meta.dtype).view(meta.shape)
