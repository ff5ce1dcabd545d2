"""Save a checkpoint: all ranks write, one publishes, and all learn how it went.

The result is a folder as Lightning's sharded strategies write it (DCP's files and ``meta.pt``), so
that ``fabric consolidate`` makes a single file of it. Unlike theirs it appears in one step,
complete and with a checksum of every file, or not at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from goose_strategy.checkpoint import meta
from goose_strategy.checkpoint.agree import collect, describe
from goose_strategy.checkpoint.manifest import EntryPath, LocalTensor, key_of
from goose_strategy.checkpoint.place import Draft, draft_of, resolved
from goose_strategy.checkpoint.planner import BoxSavePlanner
from goose_strategy.checkpoint.storage import METADATA_FILE, CheckedWriter
from goose_strategy.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goose_strategy.checkpoint.files import FileRecord
    from goose_strategy.mesh.mesh import ParallelMesh


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What goes into a checkpoint, seen from one rank.

    Args:
        tensors: The parts that this rank holds.
        meta: Values that are no tensors of the model or the optimizer, by the user's name; rank
            0's are saved.
        objects: Values that belong into a nested entry beside its tensors, such as an optimizer's
            ``("optimizer", "param_groups", 0, "lr")``; rank 0's are saved. Safe types only.
        identity: Facts that a model must share to load this, e.g. ``{"class": "LlamaModel"}``.
        models: Per entry, what an export has to know of the transformers models in it. Safe types
            only.
    """

    tensors: Sequence[LocalTensor]
    meta: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[EntryPath, Any] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


def save_checkpoint(
    path: str | os.PathLike[str], contents: Contents, *, mesh: ParallelMesh
) -> None:
    """Write a checkpoint; collective over all ranks.

    A checkpoint (or a file) that is at ``path`` already is replaced once the new one is complete.

    Args:
        path: The folder that will appear, on a file system that all ranks share, or a URL that
            fsspec knows; rank 0's counts.
        contents: What to save.
        mesh: The ranks.

    Raises:
        CheckpointError: On all ranks, with the first cause, if it failed on one. What was at
            ``path`` before is still there then.
    """
    ranks = mesh.layout.world_size
    target = collect(mesh, f"saving path={os.fspath(path)!r}", lambda: resolved(path, ranks=ranks))[
        0
    ]
    doing = f"saving path={target!r}"
    is_first = mesh.rank == 0
    drafts: list[Draft] = []
    collect(mesh, doing, lambda: drafts.append(draft_of(target, is_first=is_first)))
    lists = _Lists(drafts[0], contents)
    answers = collect(mesh, doing, lambda: lists.open() if is_first else False)
    lists.draft.replaces = answers[0]
    try:
        files, aliases = _write_shards(lists.draft, contents, mesh, doing)
        record = meta.Record(
            layout=mesh.layout,
            identity=contents.identity,
            files=files,
            aliases=aliases,
            models=contents.models,
        )
        collect(mesh, doing, lambda: lists.publish(record) if is_first else None)
    finally:
        with contextlib.suppress(OSError):
            lists.draft.discard()


class _Lists:
    """What rank 0 alone writes into the checkpoint under construction."""

    def __init__(self, draft: Draft, contents: Contents) -> None:
        self.draft = draft
        self._contents = contents
        self._safe: dict[str, Any] = {}
        self._pickled: dict[str, Any] = {}
        self._obstacles: dict[str, str] = {}

    def open(self) -> bool:
        """Check all that can be checked before anything is written, and make room.

        Returns:
            Whether there is a checkpoint of that name already.
        """
        contents = self._contents
        taken = {tensor.entry for tensor in contents.tensors} | {
            str(p[0]) for p in contents.objects
        }
        if twice := sorted(taken & set(contents.meta)):
            raise CheckpointError(f"{twice[0]!r} is given both as meta and as tensors or objects.")
        _, _, obstacles = meta.split({key_of(path): obj for path, obj in contents.objects.items()})
        for key, obstacle in obstacles.items():
            raise CheckpointError(f"{key} holds {obstacle}; only plain values can be kept there.")
        self._safe, self._pickled, self._obstacles = meta.split(contents.meta)
        return self.draft.prepare()

    def publish(self, record: meta.Record) -> None:
        """Complete the folder and put it in place."""
        staging = self.draft.staging
        files = {**record.files, **meta.write_pickled(staging, self._pickled)}
        complete = dataclasses.replace(record, files=files, pickled=self._obstacles)
        meta.write_meta(staging, self._safe, complete)
        self.draft.publish()


def _write_shards(
    draft: Draft, contents: Contents, mesh: ParallelMesh, doing: str
) -> tuple[dict[str, FileRecord], dict[str, str]]:
    """Let DCP write all boxes.

    Returns:
        The records of all files, and on rank 0 the key that each alias names.
    """
    planner = BoxSavePlanner(contents.tensors, contents.objects if mesh.rank == 0 else {})
    writer = CheckedWriter(draft.staging, planner.aliases)
    try:
        dcp_save({}, storage_writer=writer, planner=planner, process_group=mesh.control)
    except CheckpointException as err:
        rank = min(err.failures)
        cause = err.failures[rank][0]
        raise CheckpointError(f"{doing} failed: {describe(cause)}", rank=rank) from cause
    files: dict[str, FileRecord] = {}
    for written in collect(mesh, doing, lambda: writer.records):
        files |= written
    own = [name for name in writer.records if name != METADATA_FILE]
    collect(mesh, doing, lambda: draft.send(own))
    return files, {alias: key for key, names in planner.aliases.items() for alias in names}
