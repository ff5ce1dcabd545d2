"""DCP's files, with a checksum of every byte written and a reader that runs no foreign code.

DCP's ``FileSystemWriter`` notes neither sizes nor checksums, so that a flipped bit is loaded
without a word, and its reader unpickles ``.metadata`` without any restriction. The format of the
files is left exactly as it is: DCP and Lightning read them without goose-strategy.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from typing_extensions import override

from goose_strategy.checkpoint.files import BLOCK, FileRecord
from goose_strategy.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    from torch.distributed.checkpoint.storage import WriteResult

METADATA_FILE = ".metadata"
"""DCP's own name for its list of keys, boxes and places in the files."""

_METADATA_GLOBALS: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "pathlib": frozenset({"PosixPath", "WindowsPath"}),
    "pathlib._local": frozenset({"PosixPath", "WindowsPath"}),
    "torch": frozenset(
        {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    ),
}


class _SummingStream(io.BufferedWriter):
    """A file that sums up what is written to it."""

    crc32 = 0

    def write(self, data: Any, /) -> int:
        """Write ``data`` and take it into the checksum."""
        self.crc32 = zlib.crc32(data, self.crc32)
        return super().write(data)


class _SummingFileSystem(FileSystem):
    """DCP's local file system; keeps a record of every file written through it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file; one opened for writing is recorded when it is closed."""
        if mode != "wb":
            with super().create_stream(path, mode) as plain:
                yield plain
            return
        raw = io.FileIO(path, "wb")
        stream = _SummingStream(raw, buffer_size=BLOCK)
        with stream:
            yield stream
            if not stream.closed:
                # DCP syncs the file of its metadata without flushing it first.
                stream.flush()
                os.fsync(stream.fileno())
        self.records[Path(path).name] = FileRecord(Path(path).stat().st_size, stream.crc32)

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        """Rename a file together with its record."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class CheckedWriter(FileSystemWriter):
    """Writes one file per rank and remembers size and checksum of each.

    Args:
        folder: Where to write; must not hold a checkpoint yet.
        aliases: Further keys per key, filled by the planner; they are entered into the metadata
            as the same data.
    """

    def __init__(self, folder: Path, aliases: Mapping[str, tuple[str, ...]]) -> None:
        super().__init__(folder, overwrite=False)
        self._summing = _SummingFileSystem()
        self._aliases = aliases
        self.fs = self._summing

    @property
    def records(self) -> dict[str, FileRecord]:
        """The files that this rank has written."""
        return dict(self._summing.records)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``.metadata``, in which an alias points to the bytes of the tensor it names."""
        named_again = [
            dataclasses.replace(result, index=dataclasses.replace(result.index, fqn=alias))
            for written in results
            for result in written
            for alias in self._aliases.get(result.index.fqn, ())
        ]
        super().finish(metadata, [*results, named_again])


class SafeReader(FileSystemReader):
    """Reads DCP's files; ``.metadata`` may name nothing but the classes that DCP itself puts there.

    Args:
        folder: The checkpoint.
    """

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata``.

        Raises:
            CheckpointError: If it names anything else.
        """
        with (Path(self.path) / METADATA_FILE).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{METADATA_FILE} holds a {type(metadata).__name__}.")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA_GLOBALS.get(module, ()):
            raise CheckpointError(
                f"{METADATA_FILE} names {module}.{name}, which DCP does not put there; the "
                "file is damaged or was made to run foreign code."
            )
        return super().find_class(module, name)
