"""Messages between two ranks through a process group.

The first message of a key is preceded by its header; after that a message costs the payload alone,
and its receive can be posted before it is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.comm.message import (
    HEADER_NUMEL,
    Make,
    Metas,
    Note,
    TensorMeta,
    check_header,
    decode,
    encode,
    key_crc,
    metas_of,
)
from goose_strategy.errors import PeerError

_HEADER_TAG = 1


class WireSend:
    """A message under way.

    It stays alive in its wire until it is waited for, because gloo drops a message whose work is
    freed before it left.
    """

    def __init__(self, wire: Wire, key: Hashable, tensors: Sequence[Tensor]) -> None:
        self._wire = wire
        self._key = key
        self._tensors: Sequence[Tensor] = tensors
        self.works: list[dist.Work] = []

    def wait(self) -> None:
        """Wait until the tensors may be written to again; further calls return at once.

        Raises:
            PeerError: If the receiver was lost or the deadline expired.
        """
        if self.works:
            self._wire.wait(self.works, f"to take the message {self._key!r}")
            self.works, self._tensors = [], ()
            self._wire.in_flight.discard(self)


class WireReceive:
    """A message to come."""

    def __init__(
        self, wire: Wire, key: Hashable, expected: Metas | None, *, note: Note, make: Make
    ) -> None:
        self._wire = wire
        self.key = key
        self.expected = expected
        self.note = note
        self.make = make
        self.header: tuple[Tensor, dist.Work] | None = None
        self.tensors: tuple[Tensor, ...] | None = None
        self.works: list[dist.Work] = []

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the message and return its tensors; further calls return them again.

        Raises:
            PeerError: If the sender was lost or the deadline expired.
            ScheduleError: If the sender's message is another one than this side expects.
        """
        return self._wire.finish(self)


class Wire:
    """This rank's end of the messages to and from one other rank.

    Args:
        peer_rank: Global rank of the other side.
        group: Communicator that holds both ranks.
        deadline: How long a wait may last; the group's own timeout if ``None``.
        device: Device on which received tensors are made.

    Attributes:
        in_flight: Sends that were not waited for yet.
    """

    def __init__(
        self,
        peer_rank: int,
        group: ProcessGroup,
        *,
        deadline: timedelta | None,
        device: torch.device,
    ) -> None:
        self._peer_rank = peer_rank
        self._peer = dist.get_group_rank(group, peer_rank)
        self._group = group
        self._deadline = deadline
        self._device = device
        self._told: dict[Hashable, int] = {}
        self._heard: dict[Hashable, tuple[Metas, int]] = {}
        self._unposted: deque[WireReceive] = deque()
        self.in_flight: set[WireSend] = set()

    def send(self, tensors: Sequence[Tensor], key: Hashable, note: Note) -> WireSend:
        """Start to send contiguous tensors; never blocks."""
        pending = WireSend(self, key, tensors)
        tag = self._told.get(key)
        if tag is None:
            header = torch.tensor(encode(metas_of(tensors), key), device=self._device)
            pending.works.append(self._group.send([header], self._peer, _HEADER_TAG))
            tag = self._told[key] = _tag(key)
        for tensor in tensors:
            note("send", tensor)
            if tensor.numel():
                pending.works.append(self._group.send([tensor], self._peer, tag))
        if pending.works:
            self.in_flight.add(pending)
        return pending

    def receive(
        self, key: Hashable, expected: Metas | None, note: Note, make: Make | None = None
    ) -> WireReceive:
        """Post the receive of the next message, as early as its shapes are known."""
        pending = WireReceive(self, key, expected, note=note, make=make or self._make)
        known = self._heard.get(key)
        if self._unposted:
            self._unposted.append(pending)
        elif known is not None:
            self._post(pending, *known)
        else:
            self._post_header(pending)
            self._unposted.append(pending)
        return pending

    def flush(self) -> None:
        """Wait for all sends that were not waited for yet."""
        for pending in list(self.in_flight):
            pending.wait()

    def finish(self, pending: WireReceive) -> tuple[Tensor, ...]:
        """Wait for ``pending``; earlier receives that still lack their header are posted first."""
        while pending.tensors is None:
            self._post_next()
        if pending.works:
            self.wait(pending.works, f"for the message {pending.key!r}")
            pending.works = []
        return pending.tensors

    def wait(self, works: Sequence[dist.Work], purpose: str) -> None:
        """Wait for ``works``, saying who waited for whom if that fails."""
        try:
            for work in works:
                if self._deadline is None:
                    work.wait()
                else:
                    work.wait(self._deadline)
        except RuntimeError as err:
            rank = dist.get_rank()
            raise PeerError(
                f"rank {rank} waited for rank {self._peer_rank} {purpose} on "
                f"{self._group.group_desc}: {err}",
                rank=rank,
            ) from err

    def _post_next(self) -> None:
        """Post the oldest receive that waits for its header or for its turn."""
        pending = self._unposted[0]
        known = self._heard.get(pending.key)
        if known is None:
            known = self._read_header(pending)
        self._unposted.popleft()
        self._post(pending, *known)

    def _post_header(self, pending: WireReceive) -> tuple[Tensor, dist.Work]:
        header = torch.zeros(HEADER_NUMEL, dtype=torch.int64, device=self._device)
        work = self._group.recv([header], self._peer, _HEADER_TAG)
        pending.header = (header, work)
        return pending.header

    def _read_header(self, pending: WireReceive) -> tuple[Metas, int]:
        """Wait for the header of ``pending`` and check it before any payload is posted."""
        header, work = pending.header or self._post_header(pending)
        self.wait([work], f"for the header of the message {pending.key!r}")
        pending.header = None
        metas = check_header(
            pending.key,
            decode(header.tolist()),
            pending.expected,
            sender=self._peer_rank,
            receiver=dist.get_rank(),
        )
        known = self._heard[pending.key] = (metas, _tag(pending.key))
        return known

    def _post(self, pending: WireReceive, metas: Metas, tag: int) -> None:
        """Make the tensors of ``pending`` and post their receives."""
        pending.tensors = tuple(pending.make(meta) for meta in metas)
        for tensor in pending.tensors:
            pending.note("receive", tensor)
            if tensor.numel():
                pending.works.append(self._group.recv([tensor], self._peer, tag))

    def _make(self, meta: TensorMeta) -> Tensor:
        return torch.empty(meta.shape, dtype=meta.dtype, device=self._device)


def _tag(key: Hashable) -> int:
    """Return the tag of a key's payload.

    Backends that heed tags (gloo) then never put one message into the tensors of another: a
    disagreement waits until the deadline and is reported, where it would abort the process.
    """
    return _HEADER_TAG + 1 + key_crc(key) % (1 << 30)
