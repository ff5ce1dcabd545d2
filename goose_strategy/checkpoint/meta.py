"""``meta.pt``: the user's values that are no tensors of the model, and the record of the files.

Lightning saves whatever it is given into ``meta.pt``; its own consolidation then fails on the first
entry that ``weights_only`` refuses, such as an OmegaConf node or a ``pathlib.Path`` among the hyper
parameters. Here such entries go to a file of their own, so that ``meta.pt`` always loads.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from goose_strategy.checkpoint.files import FileRecord, check_file, checksum_of
from goose_strategy.checkpoint.folder import META_FILE, PICKLED_FILE, check_complete
from goose_strategy.errors import CheckpointError
from goose_strategy.mesh.layout import MeshLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

RECORD_KEY = "goose3d"
"""The entry of meta.pt that is ours."""

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Record:
    """What goose-strategy notes about a checkpoint.

    Args:
        layout: Sizes of the mesh that wrote it.
        identity: Facts about the model that a loading model must share, e.g. its class.
        files: Size and checksum per file, meta.pt excepted.
        aliases: Key of the tensor that each further key names.
        models: Per entry, what an export has to know of the transformers models in it; plain
            values.
        pickled: Entries that lie in the other file, with the classes that put them there.
        format: Version of this record.
    """

    layout: MeshLayout
    identity: Mapping[str, str]
    files: Mapping[str, FileRecord]
    aliases: Mapping[str, str] = field(default_factory=dict)
    models: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    pickled: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def plain(self) -> dict[str, Any]:
        """Return the record as types that ``weights_only`` loads."""
        return {
            "format": self.format,
            "layout": asdict(self.layout),
            "identity": dict(self.identity),
            "files": {name: tuple(record) for name, record in self.files.items()},
            "aliases": dict(self.aliases),
            "models": {entry: [dict(m) for m in found] for entry, found in self.models.items()},
            "pickled": dict(self.pickled),
        }

    @classmethod
    def parse(cls, plain: Any, path: Path) -> Record:
        """Read what `plain` returned.

        Raises:
            CheckpointError: If it is something else, or of a later version.
        """
        if not isinstance(plain, dict) or plain.get("format") is None:
            raise CheckpointError(
                f"path='{path}' was not written by goose-strategy: {META_FILE} has no "
                f"{RECORD_KEY!r} entry, so that nothing can be verified. Convert it with "
                "`fabric consolidate` and load the single file."
            )
        if plain["format"] != FORMAT:
            raise CheckpointError(
                f"path='{path}' has format={plain['format']}, this version reads format={FORMAT}; "
                "install the version that wrote it."
            )
        files = {name: FileRecord(*record) for name, record in plain["files"].items()}
        return cls(
            layout=MeshLayout(**plain["layout"]),
            identity=plain["identity"],
            files=files,
            aliases=plain["aliases"],
            # Not in the checkpoints of earlier versions.
            models=plain.get("models", {}),
            pickled=plain["pickled"],
        )


def split(meta: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Divide entries into those that ``weights_only`` loads and the others.

    Args:
        meta: The user's entries.

    Returns:
        The first kind, the second kind, and for the second kind what stands in the way.

    Raises:
        CheckpointError: If an entry cannot be pickled at all, or has our own name.
    """
    if RECORD_KEY in meta:
        raise CheckpointError(
            f"meta has an entry {RECORD_KEY!r}; the name is taken, choose another."
        )
    safe: dict[str, Any] = {}
    pickled: dict[str, Any] = {}
    obstacles: dict[str, str] = {}
    for name, value in meta.items():
        obstacle = _obstacle(name, value)
        if obstacle is None:
            safe[name] = value
        else:
            pickled[name], obstacles[name] = value, obstacle
    return safe, pickled, obstacles


def write_meta(folder: Path, safe: Mapping[str, Any], record: Record) -> None:
    """Write meta.pt durably; nothing may be written to the folder afterwards."""
    with (folder / META_FILE).open("wb") as file:
        torch.save({**safe, RECORD_KEY: record.plain()}, file)
        file.flush()
        os.fsync(file.fileno())


def write_pickled(folder: Path, pickled: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Write the entries that need an unrestricted unpickler, if there are any.

    Returns:
        The record of the file, if it was written.
    """
    if not pickled:
        return {}
    path = folder / PICKLED_FILE
    with path.open("wb") as file:
        torch.save(dict(pickled), file)
        file.flush()
        os.fsync(file.fileno())
    return {PICKLED_FILE: FileRecord(path.stat().st_size, checksum_of(path))}


def load_meta(path: Path) -> tuple[dict[str, Any], Record]:
    """Read meta.pt of a finished checkpoint, by the restricted unpickler only.

    Returns:
        The user's entries in it, and our record.

    Raises:
        CheckpointError: If there is no finished checkpoint, or meta.pt is damaged.
    """
    check_complete(path)
    file = path / META_FILE
    try:
        # torch does not compare the checksums that its own zip files carry.
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        meta = torch.load(file, map_location="cpu", weights_only=True) if not damaged else {}
    except Exception as err:  # Of a damaged zip file anything can follow.
        raise CheckpointError(f"{file} is truncated or damaged: {err}") from err
    if damaged:
        raise CheckpointError(f"{file} is damaged: {damaged} does not match its checksum.")
    plain = meta.pop(RECORD_KEY, None) if isinstance(meta, dict) else None
    return meta, Record.parse(plain, path)


def load_pickled(path: Path, record: Record, *, weights_only: bool | None) -> dict[str, Any]:
    """Read the entries that need an unrestricted unpickler.

    Args:
        path: The checkpoint.
        record: Its record.
        weights_only: As ``torch.load`` takes it; ``None`` is torch's default, which is ``True``.

    Returns:
        The entries.

    Raises:
        CheckpointError: If they are refused, or the file is damaged.
    """
    if not record.pickled:
        return {}
    check_file(path, PICKLED_FILE, record.files[PICKLED_FILE], checksum=True)
    try:
        entries: dict[str, Any] = torch.load(
            path / PICKLED_FILE, map_location="cpu", weights_only=weights_only
        )
    except pickle.UnpicklingError as err:
        listed = "; ".join(f"{name!r} ({why})" for name, why in record.pickled.items())
        raise CheckpointError(
            f"path='{path}': weights_only={weights_only} refuses the entries {listed}. Allow these "
            "classes with torch.serialization.add_safe_globals, or load with weights_only=False if "
            "you trust the file."
        ) from err
    return entries


def _obstacle(name: str, value: Any) -> str | None:
    """Return what keeps ``weights_only`` from loading ``value``, or ``None`` if nothing does."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as err:  # Pickling calls the value's own code.
        raise CheckpointError(
            f"meta entry {name!r} of type {type(value).__name__} cannot be saved: {err}"
        ) from err
    stream.seek(0)
    with _default_safe_globals():
        try:
            torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as err:  # noqa: BLE001  # the restricted unpickler fails in many ways
            stream.seek(0)
            unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(stream)
            return ", ".join(sorted(unsafe)) or str(err).splitlines()[0]
    return None


@contextmanager
def _default_safe_globals() -> Iterator[None]:
    """Leave out what this process has allowed: another one, which consolidates, has not."""
    allowed = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(allowed)
