"""Sizes and checksums of files: what was written, and whether it is still there.

The checksum is CRC-32: it finds every flipped bit and every torn page, at the speed of memory.
It is no signature; who can change a file can change the record too.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

from goose_strategy.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 1 << 22
"""Bytes that are read or written at once."""


class FileRecord(NamedTuple):
    """Size in bytes and CRC-32 of a file as it was written."""

    size: int
    crc32: int


def check_file(folder: Path, name: str, expected: FileRecord, *, checksum: bool) -> None:
    """Check that a file is as it was written.

    Args:
        folder: The checkpoint.
        name: Name of the file in it.
        expected: Its record.
        checksum: Also read it and compare the checksum.

    Raises:
        CheckpointError: If it is missing, has another size, or another checksum.
    """
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; expected a file of size={expected.size} bytes.")
    found = path.stat().st_size
    if found != expected.size:
        raise CheckpointError(
            f"{path} has size={found} bytes, expected size={expected.size}: it was truncated or "
            "overwritten."
        )
    if checksum and (crc32 := checksum_of(path)) != expected.crc32:
        raise CheckpointError(
            f"{path} has crc32={crc32:#010x}, expected crc32={expected.crc32:#010x}: its contents "
            "were changed after it was written."
        )


def checksum_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    crc32 = 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            crc32 = zlib.crc32(block, crc32)
    return crc32
