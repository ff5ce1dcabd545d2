"""Load a checkpoint into any layout: check everything first, then read the boxes this rank holds.

DCP's loader finds a wrong shape on one rank while another has begun to overwrite its model, and
finds damaged bytes not at all. Here nothing is written into a destination before all ranks know
that the checkpoint is finished, undamaged, and of this model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from goose_strategy.checkpoint import folder, meta
from goose_strategy.checkpoint.agree import collect
from goose_strategy.checkpoint.files import check_file
from goose_strategy.checkpoint.manifest import EntryPath, LocalTensor, nested
from goose_strategy.checkpoint.planner import BoxLoadPlanner
from goose_strategy.checkpoint.storage import METADATA_FILE, SafeReader
from goose_strategy.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from goose_strategy.mesh.mesh import ParallelMesh

_LISTED = 5


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint: where it lies, its shape and its dtype."""

    path: EntryPath
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Mismatch:
    """What a load that was not strict left out.

    Args:
        missing: Keys that were wanted and are not in the checkpoint.
        unexpected: Keys of the loaded entries that nobody wanted.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class Checkpoint:
    """A finished checkpoint, opened; nothing but its lists and small values has been read.

    Made by `open_checkpoint`.

    Attributes:
        path: The folder.
        meta: The user's values that are no tensors of the model or optimizer.
        record: Layout that wrote it, identity of the model, files.
        tensors: Every tensor in it, per flat key.
    """

    def __init__(
        self, path: Path, entries: dict[str, Any], record: meta.Record, reader: SafeReader
    ) -> None:
        self.path = path
        self.meta = entries
        self.record = record
        self._reader = reader
        self._metadata: Metadata = reader.read_metadata()
        reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        self._paths: Mapping[str, EntryPath] = self._metadata.planner_data
        self.tensors: dict[str, StoredTensor] = {
            key: StoredTensor(self._paths[key], tuple(stored.size), stored.properties.dtype)
            for key, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def read_objects(self, entry: str) -> dict[str, Any]:
        """Read the values beside the tensors of one entry, e.g. an optimizer's ``param_groups``.

        Args:
            entry: The user's name, e.g. ``"optimizer"``.

        Returns:
            Nested dicts and lists, as they were before they were taken apart; empty if there are
            none. Loaded by the restricted unpickler.
        """
        keys = [
            key
            for key, path in self._paths.items()
            if str(path[0]) == entry and key not in self.tensors
        ]
        planner = BoxLoadPlanner(self._metadata, object_keys=keys)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        flat = {self._paths[key]: value for key, value in planner.objects.items()}
        objects: dict[str, Any] = nested(flat).get(entry, {})
        return objects

    def read_tensors(self, destinations: Sequence[LocalTensor]) -> None:
        """Fill this rank's destinations; all of them must be in the checkpoint."""
        planner = BoxLoadPlanner(self._metadata, destinations)
        with torch.no_grad():
            self._reader.read_data(planner.create_local_plan(), planner).wait()

    def plan(self, destinations: Sequence[LocalTensor]) -> None:
        """Check that every element of the destinations is there."""
        BoxLoadPlanner(self._metadata, destinations).create_local_plan()


def open_checkpoint(
    path: str | os.PathLike[str], *, mesh: ParallelMesh, weights_only: bool | None = None
) -> Checkpoint:
    """Open a checkpoint and read its lists; collective over all ranks.

    Args:
        path: The folder; rank 0's counts.
        mesh: The ranks.
        weights_only: Lightning's argument. ``True`` refuses entries of classes that the restricted
            unpickler does not know. ``None`` means ``False`` here, because the Trainer hands on
            ``None`` where its user wrote ``False``. Tensors, lists and meta.pt are always read by
            the restricted unpickler.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: On all ranks, if there is no finished checkpoint, if its lists are damaged,
            or if ``weights_only=True`` refuses an entry.
    """
    doing = f"opening path={os.fspath(path)!r}"
    target = collect(mesh, doing, lambda: folder.local_path(path))[0]
    opened: list[Checkpoint] = []
    collect(mesh, doing, lambda: opened.append(_open(target, weights_only=weights_only)))
    return opened[0]


def load_tensors(
    checkpoint: Checkpoint,
    destinations: Sequence[LocalTensor],
    *,
    mesh: ParallelMesh,
    identity: Mapping[str, str] | None = None,
    strict: bool = True,
    verify: bool = True,
) -> Mismatch:
    """Read the pieces of ``destinations``, whatever layout wrote them; collective.

    Nothing is written into any piece before every check has passed on every rank.

    Args:
        checkpoint: From `open_checkpoint`.
        destinations: What this rank wants; the pieces are filled in place.
        mesh: The ranks.
        identity: Facts about the model that must equal those saved, as far as both name them.
        strict: Also refuse keys that are missing on one side, for every entry that is loaded.
        verify: Compare the checksum of every file first; sizes always are. The files are divided
            among the ranks.

    Returns:
        The keys left out; empty if ``strict``.

    Raises:
        CheckpointError: On all ranks, if a file is missing or damaged or the checkpoint is of
            another model; the message lists the first differences.
    """
    doing = f"loading path='{checkpoint.path}'"
    collect(mesh, doing, lambda: _check_files(checkpoint, mesh, verify=verify))
    wanted = collect(mesh, doing, lambda: {t.key: t.entry for t in destinations})
    everyone: dict[str, str] = {}
    for theirs in wanted:
        everyone |= theirs
    mismatch = _mismatch(checkpoint, everyone)
    present = [tensor for tensor in destinations if tensor.key in checkpoint.tensors]

    def check() -> None:
        found = _identity_differences(checkpoint, identity or {}) if strict else []
        if strict:
            found += [f"{key} is not in the checkpoint" for key in mismatch.missing]
            found += [f"{key} is in the checkpoint only" for key in mismatch.unexpected]
        found += _shape_differences(checkpoint, present)
        if found:
            more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
            raise CheckpointError(
                "it is a checkpoint of another model: " + "; ".join(found[:_LISTED]) + more + "."
            )
        checkpoint.plan(present)

    collect(mesh, doing, check)
    collect(mesh, doing, lambda: checkpoint.read_tensors(present))
    return mismatch


def _open(path: Path, *, weights_only: bool | None) -> Checkpoint:
    entries, record = meta.load_meta(path)
    check_file(path, METADATA_FILE, record.files[METADATA_FILE], checksum=True)
    entries |= meta.load_pickled(path, record, weights_only=weights_only)
    return Checkpoint(path, entries, record, SafeReader(path))


def _check_files(checkpoint: Checkpoint, mesh: ParallelMesh, *, verify: bool) -> None:
    """Check this rank's share of the files."""
    files = sorted(checkpoint.record.files.items())
    for name, expected in files[mesh.rank :: mesh.layout.world_size]:
        check_file(checkpoint.path, name, expected, checksum=verify)


def _mismatch(checkpoint: Checkpoint, wanted: Mapping[str, str]) -> Mismatch:
    entries = set(wanted.values())
    aliases = checkpoint.record.aliases
    missing = tuple(key for key in wanted if key not in checkpoint.tensors)
    unexpected = tuple(
        key
        for key, stored in checkpoint.tensors.items()
        if str(stored.path[0]) in entries and key not in wanted and key not in aliases
    )
    return Mismatch(missing, unexpected)


def _identity_differences(checkpoint: Checkpoint, identity: Mapping[str, str]) -> list[str]:
    saved = checkpoint.record.identity
    return [
        f"{name}={value!r} here, {name}={saved[name]!r} in the checkpoint"
        for name, value in identity.items()
        if saved.get(name, value) != value
    ]


def _shape_differences(checkpoint: Checkpoint, destinations: Sequence[LocalTensor]) -> list[str]:
    found: list[str] = []
    for tensor in destinations:
        stored = checkpoint.tensors[tensor.key]
        if stored.shape != tuple(tensor.global_shape):
            found.append(
                f"{tensor.key} has shape={tuple(tensor.global_shape)} here, shape={stored.shape} "
                "in the checkpoint"
            )
        elif stored.dtype.is_floating_point != tensor.dtype.is_floating_point:
            found.append(
                f"{tensor.key} has dtype={tensor.dtype} here, dtype={stored.dtype} in the "
                "checkpoint"
            )
    return found
