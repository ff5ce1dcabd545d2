"""What a message between two stages is made of, and the header that says so.

A header is a short row of integers, so that it fits a tensor on any backend as well as a packet on
a socket; both sides check it before anything of the payload is touched.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from goose_strategy.errors import ScheduleError

HEADER_NUMEL = 64

_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_MAGIC = 0x600531


class TensorMeta(NamedTuple):
    """Shape and type of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


Metas: TypeAlias = tuple[TensorMeta, ...]


Note: TypeAlias = Callable[[str, Tensor], None]
"""Called with ``"send"`` or ``"receive"`` and each tensor, to record it."""


Make: TypeAlias = Callable[[TensorMeta], Tensor]
"""Makes the tensor that a part of a message is received into."""


def on_host(meta: TensorMeta) -> Tensor:
    """Make a tensor on the CPU."""
    return torch.empty(meta.shape, dtype=meta.dtype)


def metas_of(tensors: Sequence[Tensor]) -> Metas:
    """Return the shapes and types of ``tensors``."""
    return tuple(TensorMeta(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def describe(metas: Metas) -> str:
    """Return shapes and types for a message to the user, e.g. ``[(2, 8, 64) float32]``."""
    parts = (f"{meta.shape} {str(meta.dtype).removeprefix('torch.')}" for meta in metas)
    return "[" + ", ".join(parts) + "]"


def key_crc(key: Hashable) -> int:
    """Return a checksum of a key that is the same in all processes."""
    return zlib.crc32(repr(key).encode())


def encode(metas: Metas, key: Hashable) -> list[int]:
    """Write key, count, types and shapes into a header of `HEADER_NUMEL` integers.

    Raises:
        ScheduleError: If a type cannot be sent, or the message has too many tensors.
    """
    values = [_MAGIC, key_crc(key), len(metas)]
    for meta in metas:
        if meta.dtype not in _DTYPES:
            raise ScheduleError(f"dtype={meta.dtype} cannot be sent; it must be one of {_DTYPES}.")
        values += [_DTYPES.index(meta.dtype), len(meta.shape), *meta.shape]
    if len(values) > HEADER_NUMEL:
        raise ScheduleError(
            f"the message {key!r} of {len(metas)} tensors needs {len(values)} header entries, "
            f"but there are {HEADER_NUMEL}; send fewer tensors in one message."
        )
    return values + [0] * (HEADER_NUMEL - len(values))


def decode(values: Sequence[int]) -> tuple[Metas, int]:
    """Read what `encode` wrote.

    Returns:
        The message's shapes and types, and the checksum of its key.

    Raises:
        ScheduleError: If this is no header.
    """
    if len(values) != HEADER_NUMEL or values[0] != _MAGIC:
        raise ScheduleError(
            f"header={list(values[:4])} is no header of a message; the ranks launch in different "
            "orders."
        )
    count, at = values[2], 3
    metas = []
    for _ in range(count):
        dtype, ndim = _DTYPES[values[at]], values[at + 1]
        metas.append(TensorMeta(tuple(values[at + 2 : at + 2 + ndim]), dtype))
        at += 2 + ndim
    return tuple(metas), values[1]


def check_header(
    key: Hashable, sent: tuple[Metas, int], expected: Metas | None, *, sender: int, receiver: int
) -> Metas:
    """Compare a header with what the receiver expects.

    Args:
        key: How the receiver names the message.
        sent: What `decode` returned.
        expected: Shapes and types that the receiver expects; whatever comes if ``None``.
        sender: Global rank of the sender.
        receiver: Global rank of the receiver.

    Returns:
        The shapes and types of the message.

    Raises:
        ScheduleError: If the sender sent another message; it names both sides.
    """
    metas, crc = sent
    if expected is not None and metas != expected:
        raise mismatch(key, metas, expected, sender=sender, receiver=receiver)
    if crc != key_crc(key):
        raise ScheduleError(
            f"rank {receiver} expects the message {key!r} from rank {sender}, which sent another "
            f"one with {describe(metas)}; both must run the same schedule over the same "
            "microbatches.",
            rank=receiver,
        )
    return metas


def mismatch(
    key: Hashable, sent: Metas, expected: Metas, *, sender: int, receiver: int
) -> ScheduleError:
    """Return the error for a message whose shapes or types the receiver does not expect."""
    return ScheduleError(
        f"the message {key!r} is {describe(sent)} on rank {sender}, which sends it, but "
        f"{describe(expected)} on rank {receiver}, which receives it; both must run the same "
        "schedule over the same microbatches.",
        rank=receiver,
    )
