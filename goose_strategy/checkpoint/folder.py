"""Where a checkpoint lies while it is written, and the step that makes it the one to be loaded.

Lightning writes into the final folder, so that a crash leaves a mixture of two checkpoints. Here
everything is written beside it and put in place by a rename, once all ranks have finished.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from goose_strategy.errors import CheckpointError

META_FILE = "meta.pt"
"""Lightning's own name for what is neither a weight nor optimizer state; written last."""

PICKLED_FILE = "meta-pickled.pt"
"""Entries of meta.pt that only an unrestricted unpickler can read."""


def staging_of(path: Path) -> Path:
    """Return the folder in which the checkpoint ``path`` is written."""
    return path.with_name(path.name + ".incomplete")


def replaced_of(path: Path) -> Path:
    """Return where the previous checkpoint of that name is during the exchange."""
    return path.with_name(path.name + ".replaced")


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as a path of the local (or shared) file system.

    Raises:
        CheckpointError: If it is a URL, or has no name of its own.
    """
    text = os.fspath(path)
    if "://" in text:
        raise CheckpointError(
            f"path={text!r} is a URL; a folder is needed here, on a file system that all ranks "
            "share. Write it there and upload it."
        )
    resolved = Path(os.path.abspath(text))
    if not resolved.name:
        raise CheckpointError(f"path={text!r} has no name of its own; choose a folder in it.")
    return resolved


def prepare(path: Path) -> Path:
    """Make the empty folder in which the checkpoint ``path`` will be written; on one rank.

    Returns:
        The folder.

    Raises:
        CheckpointError: If there is a folder at ``path`` that is not a checkpoint.
    """
    if path.is_dir() and not (path / META_FILE).is_file() and any(path.iterdir()):
        raise CheckpointError(
            f"path='{path}' is a folder with other things in it (no {META_FILE}); choose another "
            "path or empty it."
        )
    recover(path)
    staging = staging_of(path)
    remove(staging)
    staging.mkdir(parents=True)
    return staging


def publish(staging: Path, path: Path) -> None:
    """Put the finished folder in place of whatever is at ``path``; on one rank.

    The previous checkpoint is moved aside, not changed, and removed last.
    """
    sync_folder(staging)
    aside = replaced_of(path)
    remove(aside)
    if os.path.lexists(path):
        path.rename(aside)
    try:
        staging.rename(path)
    except OSError:
        recover(path)
        raise
    sync_folder(path.parent)
    remove(aside)


def recover(path: Path) -> None:
    """Move a previous checkpoint back that a crash between two renames left aside; on one rank."""
    aside = replaced_of(path)
    if os.path.lexists(aside) and not os.path.lexists(path):
        aside.rename(path)


def check_complete(path: Path) -> None:
    """Check that there is a finished sharded checkpoint at ``path``.

    Raises:
        CheckpointError: If there is none; the message says what is there instead.
    """
    if (path / META_FILE).is_file():
        return
    if not path.exists():
        hint = ""
        if (replaced_of(path) / META_FILE).is_file():
            hint = (
                f" A save was interrupted after it had moved the previous checkpoint to "
                f"'{replaced_of(path)}'; rename that back."
            )
        elif staging_of(path).exists():
            hint = f" '{staging_of(path)}' was left by a save that did not finish."
        raise CheckpointError(f"path='{path}' does not exist.{hint}")
    if path.is_dir():
        raise CheckpointError(
            f"path='{path}' has no {META_FILE}, which is written last: either the save was "
            "interrupted or this is no checkpoint."
        )
    raise CheckpointError(f"path='{path}' is a single file, not a sharded checkpoint.")


def remove(path: Path) -> None:
    """Remove a file or folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the system can do that for folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
