"""Load a checkpoint into any layout: check everything first, then read the boxes this rank holds.

DCP's loader finds a wrong shape on one rank while another has begun to overwrite its model, and
finds damaged bytes not at all. Here nothing is written into a destination before all ranks know
that the checkpoint is finished, undamaged, and of this model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from goose_strategy.checkpoint import folder, meta
from goose_strategy.checkpoint.agree import collect
from goose_strategy.checkpoint.files import check_file
from goose_strategy.checkpoint.manifest import LocalTensor, key_of
from goose_strategy.checkpoint.opened import Checkpoint, ShardedCheckpoint, load_single_file
from goose_strategy.checkpoint.place import CONTENT, fetched, fetched_alone, resolved
from goose_strategy.checkpoint.remote import is_remote
from goose_strategy.checkpoint.storage import METADATA_FILE
from goose_strategy.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from goose_strategy.mesh.mesh import ParallelMesh

_LISTED = 5


@dataclass(frozen=True)
class Mismatch:
    """What a load that was not strict left out.

    Args:
        missing: Keys that were wanted and are not in the checkpoint.
        unexpected: Keys of the loaded entries that nobody wanted.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def open_checkpoint(
    path: str | os.PathLike[str],
    *,
    mesh: ParallelMesh,
    weights_only: bool | None = None,
    verify: bool = True,
) -> Checkpoint:
    """Open a checkpoint, verify its files and read all but its tensors; collective.

    Args:
        path: The folder, or a single file, or a URL of either that fsspec knows, which is
            downloaded once per machine; rank 0's counts.
        mesh: The ranks.
        weights_only: As ``torch.load`` takes it, for the values among the user's that the
            restricted unpickler refuses; ``None`` is torch's default. Tensors, lists and meta.pt
            of a folder are always read by the restricted unpickler.
        verify: Compare the checksum of every file of a folder; sizes always are. The files are
            divided among the ranks.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: On all ranks, if there is no finished checkpoint, if a file of it is
            missing or damaged, or if ``weights_only`` refuses a value.
    """
    doing = f"opening path={os.fspath(path)!r}"
    ranks = mesh.layout.world_size
    target = collect(mesh, doing, lambda: resolved(path, ranks=ranks))[0]
    copy = fetched(target, mesh=mesh, doing=doing) if is_remote(target) else None
    place = folder.local_path(target) if copy is None else copy.path / CONTENT
    opened: list[Checkpoint] = []
    collect(mesh, doing, lambda: opened.append(_open(place, weights_only=weights_only)))
    checkpoint = opened[0]
    checkpoint.name, checkpoint.copy = target, copy
    ranks = mesh.layout.world_size
    collect(mesh, doing, lambda: checkpoint.verify(part=mesh.rank, parts=ranks, checksum=verify))
    collect(mesh, doing, checkpoint.load_objects)
    return checkpoint


def open_alone(path: str | os.PathLike[str], *, verify: bool = True) -> ShardedCheckpoint:
    """Open a sharded checkpoint in one process, without the user's values.

    Args:
        path: The folder, or its URL.
        verify: Compare the checksum of every file; sizes always are.

    Raises:
        CheckpointError: If there is no finished checkpoint, or a file of it is damaged.
    """
    target = resolved(path)
    copy = fetched_alone(target) if is_remote(target) else None
    place = folder.local_path(target) if copy is None else copy.path / CONTENT
    entries, record = meta.load_meta(place)
    check_file(place, METADATA_FILE, record.files[METADATA_FILE], checksum=True)
    checkpoint = ShardedCheckpoint(place, entries, record)
    checkpoint.name, checkpoint.copy = target, copy
    checkpoint.verify(part=0, parts=1, checksum=verify)
    return checkpoint


def load_tensors(
    checkpoint: Checkpoint,
    destinations: Sequence[LocalTensor],
    *,
    mesh: ParallelMesh,
    entries: Sequence[str] = (),
    identity: Mapping[str, str] | None = None,
    strict: bool = True,
) -> Mismatch:
    """Read the pieces of ``destinations``, whatever layout wrote them; collective.

    Nothing is written into any piece before every check has passed on every rank.

    Args:
        checkpoint: From `open_checkpoint`.
        destinations: What this rank wants; the pieces are filled in place.
        mesh: The ranks.
        entries: Entries that are to be loaded completely, besides those of the destinations: an
            optimizer's, whose names may all be unknown.
        identity: Facts about the model that must equal those saved, as far as both name them.
        strict: Refuse another identity, and keys that are missing on one side, for every entry
            that is loaded. Another shape is always refused.

    Returns:
        The keys left out; empty if ``strict``.

    Raises:
        CheckpointError: On all ranks, if the checkpoint is of another model; the message lists the
            first differences.
    """
    doing = f"loading path={checkpoint.name!r}"
    mine = _Wanted(
        {t.key for t in destinations}, {t.entry for t in destinations} | {*entries}, set()
    )
    mine.other_names.update(key_of(alias) for t in destinations for alias in t.aliases)
    mismatch = _mismatch(checkpoint, collect(mesh, doing, lambda: mine))
    present = [tensor for tensor in destinations if tensor.key in checkpoint.tensors]

    def check() -> None:
        found = _shape_differences(checkpoint, present)
        if strict:
            found += _identity_differences(checkpoint, identity or {})
            found += [f"{key} is not in the checkpoint" for key in mismatch.missing]
            found += [f"{key} is in the checkpoint only" for key in mismatch.unexpected]
        if found:
            more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
            raise CheckpointError(
                "it is a checkpoint of another model: " + "; ".join(found[:_LISTED]) + more + "."
            )
        checkpoint.plan(present)

    collect(mesh, doing, check)
    collect(mesh, doing, lambda: checkpoint.read(present))
    return mismatch


def _open(path: Path, *, weights_only: bool | None) -> Checkpoint:
    if path.is_file():
        return load_single_file(path, weights_only=weights_only)
    entries, record = meta.load_meta(path)
    check_file(path, METADATA_FILE, record.files[METADATA_FILE], checksum=True)
    entries |= meta.load_pickled(path, record, weights_only=weights_only)
    return ShardedCheckpoint(path, entries, record)


class _Wanted(NamedTuple):
    """Keys that a rank wants, entries they belong to, further names of the same tensors."""

    keys: set[str]
    entries: set[str]
    other_names: set[str]


def _mismatch(checkpoint: Checkpoint, ranks: Sequence[_Wanted]) -> Mismatch:
    wanted = {key for rank in ranks for key in rank.keys}
    entries = {entry for rank in ranks for entry in rank.entries}
    spared = {key for rank in ranks for key in rank.other_names} | checkpoint.aliases.keys()
    missing = sorted(wanted - checkpoint.tensors.keys())
    unexpected = sorted(
        key
        for key, stored in checkpoint.tensors.items()
        if str(stored.path[0]) in entries and key not in wanted | spared
    )
    return Mismatch(tuple(missing), tuple(unexpected))


def _identity_differences(checkpoint: Checkpoint, identity: Mapping[str, str]) -> list[str]:
    saved = checkpoint.identity
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
