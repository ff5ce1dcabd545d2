"""Messages between two pipeline stages.

``torch.distributed.isend`` hands shapes of the receiver's choosing to the backend: where sender and
receiver disagree, gloo aborts the process and NCCL hangs or mixes up data. ``StageLink`` sends a
header the first time it sees a ``key``, so that a disagreement is a Python error that names both
sides; after that a message costs the payload alone. Its sends never block, and its waits say who
waited for whom.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Hashable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.comm.recorder import ACTIVE, Recorder
from goose_strategy.errors import PeerError, ScheduleError

_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_HEADER_NUMEL = 64
_HEADER_TAG = 1
_MAGIC = 0x600531


class TensorMeta(NamedTuple):
    """Shape and type of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Metas = tuple[TensorMeta, ...]


def metas_of(tensors: Sequence[Tensor]) -> Metas:
    """Return the shapes and types of ``tensors``."""
    return tuple(TensorMeta(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


class PendingSend:
    """A message under way.

    It stays alive in its link until it is waited for, because gloo drops a message whose work is
    freed before it left.
    """

    def __init__(self, link: StageLink, key: Hashable, tensors: Sequence[Tensor]) -> None:
        self._link = link
        self._key = key
        self._tensors: Sequence[Tensor] = tensors
        self.works: list[dist.Work] = []

    def wait(self) -> None:
        """Wait until the tensors may be written to again; further calls return at once.

        Raises:
            PeerError: If the receiver was lost or the deadline expired.
        """
        if self.works:
            self._link.wait_works(self.works, f"to take the message {self._key!r}")
            self.works, self._tensors = [], ()
            self._link.in_flight.discard(self)


class PendingReceive:
    """A message to come. Built by `StageLink.receive` and `StageLink.post_receive`."""

    def __init__(self, link: StageLink, key: Hashable, expected: Metas | None) -> None:
        self._link = link
        self.key = key
        self.expected = expected
        self.header: tuple[Tensor, dist.Work] | None = None
        self.tensors: tuple[Tensor, ...] | None = None
        self.works: list[dist.Work] = []

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the message and return its tensors; further calls return them again.

        Raises:
            PeerError: If the sender was lost or the deadline expired.
            ScheduleError: If the sender's message is another one than this side expects.
        """
        return self._link.finish(self)


class StageLink:
    """The messages of this rank to and from one other rank over one communicator.

    Both sides must send and receive in the same order, and name each message by the same ``key``:
    anything hashable whose ``repr`` is the same on both sides and that fixes the shapes, e.g.
    ``("hidden", batch, sequence)``.

    Args:
        peer_rank: Global rank of the other side.
        group: Communicator that holds both ranks.
        recorder: Records the launches, beside the recorders installed by ``recording``.
        deadline: How long a wait may last; the group's own timeout if ``None``.
        device: Device on which received tensors are made.

    Attributes:
        in_flight: Sends that were not waited for yet.
    """

    def __init__(
        self,
        peer_rank: int,
        group: ProcessGroup,
        recorder: Recorder | None = None,
        deadline: timedelta | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        self.peer_rank = peer_rank
        self._peer = dist.get_group_rank(group, peer_rank)
        self._group = group
        self._recorder = recorder
        self._deadline = deadline
        self._device = device if device is not None else torch.device("cpu")
        self._sent: dict[Hashable, tuple[Metas, int]] = {}
        self._received: dict[Hashable, tuple[Metas, int]] = {}
        self._unposted: deque[PendingReceive] = deque()
        self.in_flight: set[PendingSend] = set()

    def send(self, tensors: Sequence[Tensor], *, key: Hashable = None) -> PendingSend:
        """Start to send ``tensors``; never blocks.

        Args:
            tensors: Any shapes, zero-size ones too; non-contiguous ones are copied.
            key: Names the message; its shapes and types if ``None``.

        Returns:
            What to wait for before the tensors are written to.

        Raises:
            ScheduleError: If a message of this key had other shapes or types before.
        """
        payload = [tensor.detach().contiguous() for tensor in tensors]
        metas = metas_of(payload)
        key = metas if key is None else key
        pending = PendingSend(self, key, payload)
        known = self._sent.get(key)
        if known is None:
            header = _encode(metas, key).to(self._device)
            pending.works.append(self._group.send([header], self._peer, _HEADER_TAG))
            known = self._sent[key] = (metas, _tag(key))
        elif known[0] != metas:
            raise ScheduleError(
                f"key={key!r} was {_describe(known[0])} when it was first sent to rank "
                f"{self.peer_rank} and is {_describe(metas)} now; give each shape its own key.",
                rank=dist.get_rank(),
            )
        for tensor in payload:
            self._note("send", tensor)
            if tensor.numel():
                pending.works.append(self._group.send([tensor], self._peer, known[1]))
        self.in_flight.add(pending)
        return pending

    def flush(self) -> None:
        """Wait for all sends that were not waited for yet."""
        for pending in list(self.in_flight):
            pending.wait()

    def receive(self, *, key: Hashable, expected: Metas | None = None) -> PendingReceive:
        """Post the receive of the next message as early as its shapes are known.

        Args:
            key: Names the message as the sender does.
            expected: Shapes and types that this side expects; whatever comes if ``None``.

        Returns:
            What to wait for.

        Raises:
            ScheduleError: If a message of this key had other shapes or types before.
        """
        pending = PendingReceive(self, key, expected)
        known = self._received.get(key)
        if known is not None and expected is not None and known[0] != expected:
            raise self._mismatch(key, known[0], expected)
        if self._unposted:
            self._unposted.append(pending)
        elif known is not None:
            self._post(pending, *known)
        else:
            self._post_header(pending)
            self._unposted.append(pending)
        return pending

    def post_receive(
        self,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        *,
        key: Hashable = None,
    ) -> PendingReceive:
        """Post the receive of a message whose shapes and types this side knows.

        Args:
            shapes: Shape of each tensor.
            dtypes: Type of each tensor.
            key: Names the message as the sender does; its shapes and types if ``None``.

        Returns:
            What to wait for.
        """
        pairs = zip(shapes, dtypes, strict=True)
        expected = tuple(TensorMeta(tuple(shape), dtype) for shape, dtype in pairs)
        return self.receive(key=expected if key is None else key, expected=expected)

    def finish(self, pending: PendingReceive) -> tuple[Tensor, ...]:
        """Wait for ``pending``; earlier receives that still lack their header are posted first."""
        while pending.tensors is None:
            self._post_next()
        self.wait_works(pending.works, f"for the message {pending.key!r}")
        pending.works = []
        return pending.tensors

    def wait_works(self, works: Sequence[dist.Work], purpose: str) -> None:
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
                f"rank {rank} waited for rank {self.peer_rank} {purpose} on "
                f"{self._group.group_desc}: {err}",
                rank=rank,
            ) from err

    def _post_next(self) -> None:
        """Post the oldest receive that waits for its header or for its turn."""
        pending = self._unposted[0]
        known = self._received.get(pending.key)
        if known is None:
            known = self._read_header(pending)
        self._unposted.popleft()
        self._post(pending, *known)

    def _post_header(self, pending: PendingReceive) -> Tensor:
        header = torch.zeros(_HEADER_NUMEL, dtype=torch.int64, device=self._device)
        pending.header = (header, self._group.recv([header], self._peer, _HEADER_TAG))
        return header

    def _read_header(self, pending: PendingReceive) -> tuple[Metas, int]:
        """Wait for the header of ``pending`` and check it before any payload is posted."""
        if pending.header is None:
            self._post_header(pending)
        if pending.header is None:
            raise ScheduleError(f"key={pending.key!r}: no header was posted.")
        header, work = pending.header
        self.wait_works([work], f"for the header of the message {pending.key!r}")
        pending.header = None
        metas, crc = _decode(header)
        if crc != _crc(pending.key):
            raise ScheduleError(
                f"rank {dist.get_rank()} expects the message {pending.key!r} from rank "
                f"{self.peer_rank}, which sent another one with {_describe(metas)}; both must run "
                "the same schedule over the same microbatches.",
                rank=dist.get_rank(),
            )
        if pending.expected is not None and metas != pending.expected:
            raise self._mismatch(pending.key, metas, pending.expected)
        known = self._received[pending.key] = (metas, _tag(pending.key))
        return known

    def _post(self, pending: PendingReceive, metas: Metas, tag: int) -> None:
        """Make the tensors of ``pending`` and post their receives."""
        tensors = tuple(
            torch.empty(meta.shape, dtype=meta.dtype, device=self._device) for meta in metas
        )
        for tensor in tensors:
            self._note("receive", tensor)
            if tensor.numel():
                pending.works.append(self._group.recv([tensor], self._peer, tag))
        pending.tensors = tensors

    def _note(self, op: str, tensor: Tensor) -> None:
        if ACTIVE:
            for recorder in ACTIVE:
                recorder.note(self._group, op, tensor, self.peer_rank)
        if self._recorder is not None:
            self._recorder.note(self._group, op, tensor, self.peer_rank)

    def _mismatch(self, key: Hashable, sent: Metas, expected: Metas) -> ScheduleError:
        return ScheduleError(
            f"the message {key!r} is {_describe(sent)} on rank {self.peer_rank}, which sends it, "
            f"but {_describe(expected)} on rank {dist.get_rank()}, which receives it; both must "
            "run the same schedule over the same microbatches.",
            rank=dist.get_rank(),
        )


def _describe(metas: Metas) -> str:
    """Return shapes and types for a message, e.g. ``[(2, 8, 64) float32]``."""
    return (
        "["
        + ", ".join(f"{meta.shape} {str(meta.dtype).removeprefix('torch.')}" for meta in metas)
        + "]"
    )


def _crc(key: Hashable) -> int:
    return zlib.crc32(repr(key).encode())


def _tag(key: Hashable) -> int:
    """Return the tag of a key's payload.

    Backends that heed tags (gloo) then never put one message into the tensors of another: a
    disagreement waits until the deadline and is reported, where it would abort the process.
    """
    return _HEADER_TAG + 1 + _crc(key) % (1 << 30)


def _encode(metas: Metas, key: Hashable) -> Tensor:
    """Write count, types and shapes into the fixed-size header."""
    values = [_MAGIC, _crc(key), len(metas)]
    for meta in metas:
        if meta.dtype not in _DTYPES:
            raise ScheduleError(f"dtype={meta.dtype} cannot be sent; it must be one of {_DTYPES}.")
        values += [_DTYPES.index(meta.dtype), len(meta.shape), *meta.shape]
    if len(values) > _HEADER_NUMEL:
        raise ScheduleError(
            f"the message {key!r} of {len(metas)} tensors needs {len(values)} header entries, "
            f"but there are {_HEADER_NUMEL}; send fewer tensors in one message."
        )
    header = torch.zeros(_HEADER_NUMEL, dtype=torch.int64)
    header[: len(values)] = torch.tensor(values)
    return header


def _decode(header: Tensor) -> tuple[Metas, int]:
    """Read what `_encode` wrote: the message's shapes and types, and the checksum of its key."""
    values: list[int] = header.tolist()
    if values[0] != _MAGIC:
        raise ScheduleError(
            f"header={values[:4]} is no header of a message; the ranks launch in different orders."
        )
    count, at = values[2], 3
    metas = []
    for _ in range(count):
        dtype, ndim = _DTYPES[values[at]], values[at + 1]
        metas.append(TensorMeta(tuple(values[at + 2 : at + 2 + ndim]), dtype))
        at += 2 + ndim
    return tuple(metas), values[1]


def numel_of(metas: Metas) -> int:
    """Return how many elements a message has in all."""
    return sum(math.prod(meta.shape) for meta in metas)
