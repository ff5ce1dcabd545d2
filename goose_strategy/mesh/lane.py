"""The way between an accelerator and the host of one rank: two streams, events, pinned memory.

NCCL refuses a second rank on a card, and gloo carries only some collectives of tensors on a device.
A group over gloo whose tensors lie on a card therefore goes through the host; ``comm.staged`` says
in which order. This module holds what that needs of the device and nothing else: a `Lane` is the
whole of it, so that the order can be checked on a machine without a card.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_SMALLEST = 4096
_SPARE = 4


class Event(Protocol):
    """A point in the work of a stream; ``torch.cuda.Event`` is one."""

    def synchronize(self) -> None:
        """Let the host wait until the stream has come here."""

    def query(self) -> bool:
        """Whether the stream has come here."""


class Stream(Protocol):
    """A row of work of the device; ``torch.cuda.Stream`` is one."""

    def wait_event(self, event: Event) -> None:
        """Let what is given to the stream from now on wait for ``event``."""


class Lane(Protocol):
    """What a device offers for copies from and to the host.

    Attributes:
        down: Carries copies to the host.
        up: Carries copies to the device. Two streams, because what goes up must not wait for
            computations whose result is only about to go down.
        pool: Host memory for them.
    """

    down: Stream
    up: Stream
    pool: PinnedPool

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies on the device."""

    def current(self) -> Stream:
        """Return the stream that computes."""

    def record(self, stream: Stream) -> Event:
        """Return the point behind all that ``stream`` has been given."""

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Let ``stream`` copy, between pinned memory and the device; the host does not wait."""


class PinnedPool:
    """Host memory that is used again once the copies from and to it are over.

    Sizes are powers of two, from 4 KiB on. Of each, at most 4 wait for their copies; a fifth user
    waits for the oldest instead of taking more memory.

    Args:
        allocate: Makes so many bytes of pinned memory.
    """

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._free: defaultdict[int, deque[tuple[Tensor, Event | None]]] = defaultdict(deque)

    def take(self, nbytes: int) -> Tensor:
        """Return at least ``nbytes`` bytes that nothing reads or writes any more."""
        size = max(_SMALLEST, 1 << max(nbytes - 1, 0).bit_length())
        free = self._free[size]
        for at, (buffer, event) in enumerate(free):
            if event is None or event.query():
                del free[at]
                return buffer
        if len(free) >= _SPARE:
            buffer, event = free.popleft()
            if event is not None:
                event.synchronize()
            return buffer
        return self._allocate(size)

    def give(self, buffer: Tensor, event: Event | None) -> None:
        """Take ``buffer`` back; it may be used again from ``event`` on."""
        self._free[buffer.numel()].append((buffer, event))


class CudaLane:
    """The way between one card and the host. See `Lane`.

    Args:
        device: The card.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.down: Any = torch.cuda.Stream(device)
        self.up: Any = torch.cuda.Stream(device)
        self.pool = PinnedPool(_pinned)

    def takes(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` lies on a card."""
        return tensor.device.type == "cuda"

    def current(self) -> Any:
        """Return the stream that computes."""
        return torch.cuda.current_stream(self._device)

    def record(self, stream: Any) -> Event:
        """Return the point behind all that ``stream`` has been given."""
        # Ranks that share a card often share few cores: one that waits shall sleep, not spin.
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        return event

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Let ``stream`` copy; the host does not wait."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)


def _pinned(nbytes: int) -> Tensor:
    # Not in a caller's inference mode: nobody outside of it could write to such memory.
    with torch.inference_mode(mode=False):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


LANES: dict[ProcessGroup, Lane] = {}
"""Groups of this process whose tensors lie on a device that their backend does not serve.

``comm`` asks it at every launch. Like ``host.PEERS``, it is filled and emptied by the mesh.
"""


def lane_for(device: torch.device) -> Lane | None:
    """Return the way between ``device`` and the host, or ``None`` if it needs none or has none."""
    return CudaLane(device) if device.type == "cuda" else None


def backend_of(group: ProcessGroup, device: torch.device) -> str:
    """Return the name of the backend that serves the tensors of ``device`` in ``group``."""
    served = dict(part.split(":", 1) for part in dist.get_backend_config(group).split(","))
    return served.get(device.type, "")
