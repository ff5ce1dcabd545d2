"""A checkpoint behind a URL: object stores and other file systems that fsspec knows.

DCP's own ``FsspecWriter`` writes straight to the final place, without a checksum, and an object
store has no rename that would make a folder appear at once. Here every rank writes into a folder of
its own machine, as for a local checkpoint, and uploads its files; ``meta.pt``, without which
nothing is loaded, comes last. To be read, a checkpoint is downloaded once per machine.
"""

from __future__ import annotations

import posixpath
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goose_strategy.checkpoint.folder import META_FILE, PICKLED_FILE
from goose_strategy.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable

_METADATA_FILE = ".metadata"
_LOCAL = ("file://", "local://")


def is_remote(path: str) -> bool:
    """Return whether a path is a URL of anything but the machine's own file system."""
    return "://" in path and not path.startswith(_LOCAL)


def without_scheme(path: str) -> str:
    """Return the path that a URL of the machine's own file system names; others as they are."""
    scheme = next((scheme for scheme in _LOCAL if path.startswith(scheme)), "")
    return path.removeprefix(scheme)


class RemoteFolder:
    """A folder behind a URL.

    Args:
        url: What fsspec takes, chains (``simplecache::s3://...``) included.

    Raises:
        CheckpointError: If fsspec does not know the protocol, or its package is missing.
    """

    def __init__(self, url: str) -> None:
        import fsspec.core

        self._fs: Any
        try:
            self._fs, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as err:
            raise CheckpointError(
                f"path={url!r} cannot be reached: {err}. Install what fsspec needs for it on every "
                "machine, or choose a path of a file system that all ranks share."
            ) from err
        self.url = url
        self._root: str = root.rstrip("/")
        if not self._root.strip("/"):
            raise CheckpointError(f"path={url!r} has no name of its own; choose a folder in it.")

    @property
    def is_private(self) -> bool:
        """Whether no other process sees it."""
        protocol = self._fs.protocol
        return "memory" in ((protocol,) if isinstance(protocol, str) else protocol)

    def beside(self, ending: str) -> RemoteFolder:
        """Return the folder of the same name with an ending."""
        other = object.__new__(RemoteFolder)
        other.url, other._fs, other._root = self.url, self._fs, self._root + ending
        return other

    def names(self) -> list[str]:
        """Return the names of all files in the folder; empty if there is none."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._root):
            return []
        # Some file systems return names with a leading slash, some without.
        start = self._root.lstrip("/") + "/"
        return sorted(name.lstrip("/").removeprefix(start) for name in self._fs.find(self._root))

    def is_file(self) -> bool:
        """Return whether the URL names a single file."""
        self._fs.invalidate_cache()
        return bool(self._fs.isfile(self._root))

    def is_complete(self) -> bool:
        """Return whether a finished checkpoint lies in it."""
        return META_FILE in self.names()

    def upload(self, folder: Path, names: Iterable[str]) -> None:
        """Copy files of a local folder into it, in this order."""
        self._fs.makedirs(self._root, exist_ok=True)
        for name in names:
            self._fs.put_file(str(folder / name), self._at(name))

    def download(self, folder: Path, names: Iterable[str]) -> None:
        """Copy files of it into a local folder."""
        for name in names:
            self._fs.get_file(self._at(name), str(folder / name))

    def download_single(self, file: Path) -> None:
        """Copy the single file that the URL names."""
        self._fs.get_file(self._root, str(file))

    def move_to(self, other: RemoteFolder) -> None:
        """Move all files; ``meta.pt`` comes last there, and goes first here."""
        last = sorted(self.names(), key=lambda name: name == META_FILE)
        other._fs.makedirs(other._root, exist_ok=True)
        for name in last:
            self._fs.cp_file(self._at(name), other._at(name))
        self.remove()

    def remove(self) -> None:
        """Remove the folder with all its files, if there is one."""
        names = self.names()
        if META_FILE in names:
            self._fs.rm_file(self._at(META_FILE))
        if names:
            self._fs.rm(self._root, recursive=True)

    def check_free(self) -> None:
        """Check that there is nothing in the folder but (parts of) a checkpoint.

        Raises:
            CheckpointError: If there is.
        """
        names = self.names()
        others = [name for name in names if not _is_ours(name)]
        if self.is_file() or (others and META_FILE not in names):
            found = others[0] if others else "a file of that name"
            raise CheckpointError(
                f"path={self.url!r} has other things in it ({found}, and no {META_FILE}); choose "
                "another path or empty it."
            )

    def _at(self, name: str) -> str:
        return posixpath.join(self._root, name)


def _is_ours(name: str) -> bool:
    return name in (META_FILE, PICKLED_FILE, _METADATA_FILE) or (
        name.startswith("__") and name.endswith(".distcp")
    )


class LocalCopy:
    """A folder of this machine, removed with the object.

    Attributes:
        path: The folder.
    """

    def __init__(self) -> None:
        made = tempfile.mkdtemp(prefix="goose3d-")
        self.path = Path(made)
        self._remove = weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)

    def remove(self) -> None:
        """Remove it now."""
        self._remove()
