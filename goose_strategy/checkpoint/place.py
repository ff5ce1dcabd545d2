"""Where a checkpoint goes and comes from: a folder that all ranks see, or a URL.

Saving and loading are the same for both, in a local folder: the shared one, or one of each machine,
whose files are then uploaded, or were downloaded before.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from goose_strategy.checkpoint import folder
from goose_strategy.checkpoint.agree import collect
from goose_strategy.checkpoint.remote import (
    LocalCopy,
    RemoteFolder,
    is_remote,
    without_scheme,
)
from goose_strategy.checkpoint.storage import METADATA_FILE
from goose_strategy.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from goose_strategy.mesh.mesh import ParallelMesh


def resolved(path: str | os.PathLike[str], *, ranks: int = 1) -> str:
    """Return a path as all ranks shall use it: absolute, or a URL.

    Args:
        path: A folder, a file or a URL.
        ranks: How many processes share it.

    Raises:
        CheckpointError: If it has no name of its own, nothing here can reach the URL, or not all
            ranks can.
    """
    text = os.fspath(path)
    if is_remote(text):
        remote = RemoteFolder(text)
        if remote.is_private and ranks > 1:
            raise CheckpointError(
                f"path={text!r} lies in the memory of one process, but {ranks} ranks share a "
                "checkpoint; choose a folder or a URL that all of them reach."
            )
        return remote.url
    return str(folder.local_path(without_scheme(text)))


class Draft(ABC):
    """A checkpoint under construction, seen from one rank.

    Attributes:
        staging: Local folder in which this rank writes its files.
        replaces: Whether there is a checkpoint already; set on all ranks after `prepare`.
    """

    staging: Path
    replaces: bool = False

    @abstractmethod
    def prepare(self) -> bool:
        """Check the place and make room; on rank 0, before anything is written.

        Returns:
            Whether a checkpoint is there already.
        """

    @abstractmethod
    def send(self, names: Iterable[str]) -> None:
        """Hand over files that this rank has written; on every rank."""

    @abstractmethod
    def publish(self) -> None:
        """Make the finished folder the checkpoint; on rank 0, once all have handed over."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what is left of the construction; on every rank."""


class LocalDraft(Draft):
    """A checkpoint on a file system that all ranks share.

    Args:
        path: Where it will be.
        is_first: Whether this is rank 0, which alone makes and removes folders.
    """

    def __init__(self, path: Path, *, is_first: bool) -> None:
        self._path = path
        self._is_first = is_first
        self.staging = folder.staging_of(path)

    def prepare(self) -> bool:
        """Make the empty folder beside the final one."""
        folder.prepare(self._path)
        return self._path.exists()

    def send(self, names: Iterable[str]) -> None:
        """Do nothing: the files lie where rank 0 sees them."""

    def publish(self) -> None:
        """Rename the folder."""
        folder.publish(self.staging, self._path)

    def discard(self) -> None:
        """Remove the folder, unless it was put in place."""
        if self._is_first:
            folder.remove(self.staging)


class RemoteDraft(Draft):
    """A checkpoint behind a URL.

    It is uploaded beside a previous one of the same name and moved into its place when it is
    complete; where there is none, straight to its place, with ``meta.pt`` last.

    Args:
        url: Where it will be.
        is_first: Whether this is rank 0, which alone removes and moves folders.
    """

    def __init__(self, url: str, *, is_first: bool) -> None:
        self._target = RemoteFolder(url)
        self._beside = self._target.beside(".incomplete")
        self._aside = self._target.beside(".replaced")
        self._copy = LocalCopy()
        self._is_first = is_first
        self._published = False
        self.staging = self._copy.path

    @property
    def _goal(self) -> RemoteFolder:
        return self._beside if self.replaces else self._target

    def prepare(self) -> bool:
        """Recover what an interrupted exchange left, and clear the place that is uploaded to."""
        self._target.check_free()
        if self._aside.is_complete() and not self._target.is_complete():
            self._target.remove()
            self._aside.move_to(self._target)
        self._beside.remove()
        if self._target.is_complete():
            return True
        self._target.remove()
        return False

    def send(self, names: Iterable[str]) -> None:
        """Upload the files."""
        self._goal.upload(self.staging, names)

    def publish(self) -> None:
        """Upload the lists, ``meta.pt`` last, and take the previous checkpoint's place."""
        lists = [n for n in (METADATA_FILE, folder.PICKLED_FILE) if (self.staging / n).exists()]
        self._goal.upload(self.staging, [*lists, folder.META_FILE])
        if self.replaces:
            self._aside.remove()
            self._target.move_to(self._aside)
            self._beside.move_to(self._target)
            self._aside.remove()
        self._published = True

    def discard(self) -> None:
        """Remove this machine's files, and what was uploaded of a save that failed."""
        self._copy.remove()
        if self._is_first and not self._published and not self._goal.is_complete():
            self._goal.remove()


def draft_of(target: str, *, is_first: bool) -> Draft:
    """Return the draft of a checkpoint at a `resolved` path."""
    if is_remote(target):
        return RemoteDraft(target, is_first=is_first)
    return LocalDraft(folder.local_path(target), is_first=is_first)


def fetched_alone(target: str) -> LocalCopy:
    """Download a checkpoint in one process; see `fetched`."""
    copy = LocalCopy()
    _download(RemoteFolder(target), copy.path / CONTENT, part=0, parts=1)
    return copy


def fetched(target: str, *, mesh: ParallelMesh, doing: str) -> LocalCopy:
    """Download a checkpoint, once on every machine. Collective over the world.

    The ranks of a machine divide the files between them.

    Args:
        target: A URL.
        mesh: The ranks.
        doing: For messages.

    Returns:
        The machine's copy, with the folder's or file's own name inside; it has to be kept as long
        as anything is read from it.

    Raises:
        CheckpointError: If there is nothing at the URL; on all ranks.
    """
    copy = LocalCopy()
    hosts = collect(mesh, doing, lambda: (socket.gethostname(), str(copy.path)))
    mine = [rank for rank, (host, _) in enumerate(hosts) if host == hosts[mesh.rank][0]]
    leader = hosts[mine[0]][1]
    shared = folder.local_path(leader)
    # Containers may share a name and no folder; then each rank has its own copy.
    if not shared.is_dir():
        shared, mine = copy.path, [mesh.rank]

    part = mine.index(mesh.rank)
    place, parts = shared / CONTENT, len(mine)

    def download() -> None:
        _download(RemoteFolder(target), place, part=part, parts=parts)

    collect(mesh, doing, download)
    copy.path = shared
    return copy


def _download(remote: RemoteFolder, place: Path, *, part: int, parts: int) -> None:
    names = remote.names()
    if names:
        place.mkdir(exist_ok=True)
        remote.download(place, names[part::parts])
    elif not remote.is_file():
        raise CheckpointError(f"path={remote.url!r} does not exist.")
    elif part == 0:
        remote.download_single(place)


CONTENT = "checkpoint"
"""Name of the downloaded folder or file inside the machine's copy."""
