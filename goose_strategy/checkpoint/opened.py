"""A checkpoint of which the lists are known and the tensors can be read by boxes.

Two kinds are read alike: the folder that all ranks wrote, and the single file that one process (or
``fabric consolidate``) wrote. Lightning has a loading path of its own for each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from goose_strategy.checkpoint.files import check_file
from goose_strategy.checkpoint.manifest import EntryPath, LocalTensor, flattened, key_of, nested
from goose_strategy.checkpoint.planner import BoxLoadPlanner
from goose_strategy.checkpoint.storage import SafeReader
from goose_strategy.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from goose_strategy.checkpoint.meta import Record
    from goose_strategy.checkpoint.remote import LocalCopy


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: where it lies, its shape and its dtype."""

    path: EntryPath
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint(ABC):
    """A finished checkpoint, opened by `open_checkpoint`; no tensor has been read yet.

    Attributes:
        path: The folder or file, on this machine.
        name: What the user calls it, for messages.
        copy: The download that it is read from, if it lies behind a URL.
        meta: The user's values that are no tensors of the model or optimizer. Of a single file,
            which does not tell them apart, everything in it.
        objects: Values beside the tensors of an entry, nested as they were before they were taken
            apart: ``objects["optimizer"]["param_groups"]``.
        tensors: Every tensor, per flat key.
        identity: Facts that a loading model must share.
        aliases: Key of the tensor that each further key names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.copy: LocalCopy | None = None
        self.meta: dict[str, Any] = {}
        self.objects: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.identity: Mapping[str, str] = {}
        self.aliases: Mapping[str, str] = {}

    @abstractmethod
    def verify(self, *, part: int, parts: int, checksum: bool) -> None:
        """Check one part of the files against their record.

        Args:
            part: Which part, from 0.
            parts: Into how many parts the files are divided.
            checksum: Also read the files and compare their checksums.

        Raises:
            CheckpointError: If a file is missing or not as it was written.
        """

    def read_objects(self, entry: str) -> dict[str, Any]:
        """Return the values beside the tensors of one entry, e.g. an optimizer's groups.

        Args:
            entry: The user's name, e.g. ``"optimizer"``.

        Returns:
            Nested dicts and lists; empty if there are none.
        """
        found: dict[str, Any] = self.objects.get(entry, {})
        return found

    @abstractmethod
    def load_objects(self) -> None:
        """Read the values beside the tensors into `objects`; after `verify`."""

    @abstractmethod
    def plan(self, destinations: Sequence[LocalTensor]) -> None:
        """Check that every element of the destinations is there.

        Raises:
            CheckpointError: If one is not.
        """

    @abstractmethod
    def read(self, destinations: Sequence[LocalTensor]) -> None:
        """Fill the pieces of the destinations; all of them must be in the checkpoint."""


class ShardedCheckpoint(Checkpoint):
    """A folder written by `save_checkpoint`.

    Args:
        path: The folder.
        entries: What meta.pt (and its companion) hold.
        record: Our record in it.

    Attributes:
        record: Layout that wrote it, files with sizes and checksums.
    """

    def __init__(self, path: Path, entries: dict[str, Any], record: Record) -> None:
        super().__init__(path)
        self.meta = entries
        self.record = record
        self.identity = record.identity
        self.aliases = record.aliases
        self._reader = SafeReader(path)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        self._paths: Mapping[str, EntryPath] = self._metadata.planner_data
        self.tensors = {
            key: StoredTensor(self._paths[key], tuple(stored.size), stored.properties.dtype)
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def verify(self, *, part: int, parts: int, checksum: bool) -> None:
        """Check every ``parts``-th file, beginning with ``part``."""
        for name, expected in sorted(self.record.files.items())[part::parts]:
            check_file(self.path, name, expected, checksum=checksum)

    def load_objects(self) -> None:
        """Read the values beside the tensors, by the restricted unpickler."""
        keys = [key for key in self._paths if key not in self.tensors]
        planner = BoxLoadPlanner(self._metadata, object_keys=keys)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        self.objects = nested({self._paths[key]: value for key, value in planner.objects.items()})

    def plan(self, destinations: Sequence[LocalTensor]) -> None:
        """Check that every element of the destinations is there."""
        BoxLoadPlanner(self._metadata, destinations).create_local_plan()

    def read(self, destinations: Sequence[LocalTensor]) -> None:
        """Read the boxes that overlap the destinations."""
        planner = BoxLoadPlanner(self._metadata, destinations)
        with torch.no_grad():
            self._reader.read_data(planner.create_local_plan(), planner).wait()


class SingleFileCheckpoint(Checkpoint):
    """A file in which one process saved everything.

    The Trainer's names in it are translated into those of a sharded checkpoint: ``state_dict`` to
    ``model`` and the list ``optimizer_states`` to ``optimizer_0``, ``optimizer_1``...

    Args:
        path: The file.
        content: What it holds; tensors may be mapped from the file.
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        super().__init__(path)
        self.meta = content
        flat: dict[EntryPath, Any] = {}
        for name, value in _sharded_names(content).items():
            flat |= flattened((str(name),), value)
        self._data = {key_of(at): value for at, value in flat.items() if torch.is_tensor(value)}
        self.tensors = {
            key_of(at): StoredTensor(at, tuple(value.shape), value.dtype)
            for at, value in flat.items()
            if torch.is_tensor(value)
        }
        self._flat = flat

    def verify(self, *, part: int, parts: int, checksum: bool) -> None:
        """Do nothing: a single file carries no record."""

    def load_objects(self) -> None:
        """Nest everything that is no tensor."""
        self.objects = nested(
            {at: value for at, value in self._flat.items() if not torch.is_tensor(value)}
        )

    def plan(self, destinations: Sequence[LocalTensor]) -> None:
        """Do nothing: the tensors are whole."""

    def read(self, destinations: Sequence[LocalTensor]) -> None:
        """Copy the boxes of the destinations."""
        with torch.no_grad():
            for tensor in destinations:
                stored = self._data[tensor.key]
                for box, piece in tensor.pieces:
                    blocks = zip(box.offsets, box.lengths, strict=True)
                    piece.copy_(stored[tuple(slice(at, at + length) for at, length in blocks)])


def _sharded_names(content: dict[str, Any]) -> dict[str, Any]:
    named = dict(content)
    if "state_dict" in named and "model" not in named:
        named["model"] = named.pop("state_dict")
    for index, state in enumerate(named.pop("optimizer_states", [])):
        named[f"optimizer_{index}"] = state
    return named


def load_single_file(path: Path, *, weights_only: bool | None) -> SingleFileCheckpoint:
    """Open a single file without reading its tensors into memory.

    Args:
        path: The file.
        weights_only: As ``torch.load`` takes it.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: If ``torch.load`` cannot read it, or it holds no dict.
    """
    try:
        content = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    except Exception as err:  # Of a damaged file anything can follow.
        first_line = str(err).splitlines()[0] if str(err) else type(err).__name__
        raise CheckpointError(
            f"path='{path}' cannot be loaded with weights_only={weights_only}: {first_line}"
        ) from err
    if not isinstance(content, dict):
        raise CheckpointError(f"path='{path}' holds a {type(content).__name__}, not a checkpoint.")
    return SingleFileCheckpoint(path, content)
