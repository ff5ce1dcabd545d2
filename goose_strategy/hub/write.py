"""Write safetensors files whose contents come in any order, from several processes.

``safetensors.save_file`` wants all tensors of a file at once, in one process. The format allows
more: the header, which says where each tensor lies, depends on shapes alone, so it is written
first, and each tensor is put in its place when it is there.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from goose_strategy.errors import CheckpointError
from goose_strategy.hub.source import DTYPES, INDEX_FILE, SINGLE_FILE

if TYPE_CHECKING:
    from goose_strategy.hub.outline import Shape
from goose_strategy.hub.plan import listed

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)


class Place(NamedTuple):
    """Where a tensor goes.

    Attributes:
        file: Name of the file.
        start: Its first byte in the file.
        kind: Its type and shape.
    """

    file: str
    start: int
    kind: Shape


class FileLayout:
    """Which tensor lies where in which file; the same on every rank that computes it.

    Args:
        tensors: Every tensor by its key, in the order in which files are filled.
        max_bytes: Largest size of a file's data; a larger tensor has a file of its own.

    Attributes:
        places: Where each tensor goes.
        total_bytes: Size of all tensors together.
    """

    def __init__(self, tensors: Mapping[str, Shape], max_bytes: int) -> None:
        self.places: dict[str, Place] = {}
        self.total_bytes = sum(map(_nbytes, tensors.values()))
        self.total_parameters = sum(math.prod(kind.shape) for kind in tensors.values())
        groups = _fill_files(tensors, max_bytes)
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        for number, keys in enumerate(groups, 1):
            name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            self._lay_out(name if len(groups) > 1 else SINGLE_FILE, keys, tensors)

    def _lay_out(self, file: str, keys: Sequence[str], tensors: Mapping[str, Shape]) -> None:
        # Wider types first, so that every tensor lies at a multiple of its elements' size.
        ordered = sorted(keys, key=lambda key: -tensors[key].dtype.itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for key in ordered:
            kind, start = tensors[key], end
            end = start + _nbytes(kind)
            header[key] = {
                "dtype": _NAMES[kind.dtype],
                "shape": list(kind.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._headers[file] = len(text).to_bytes(8, "little") + text
        begin = len(self._headers[file])
        self._sizes[file] = begin + end
        for key in ordered:
            start, _ = header[key]["data_offsets"]
            self.places[key] = Place(file, begin + start, tensors[key])

    def create(self, folder: Path) -> None:
        """Make the files in their full size, with headers and the index; on one rank."""
        for name, header in self._headers.items():
            with (folder / name).open("wb") as file:
                file.write(header)
                file.truncate(self._sizes[name])
        if len(self._headers) == 1:
            return
        index = {
            "metadata": {
                "total_parameters": self.total_parameters,
                "total_size": self.total_bytes,
                "format": "pt",
            },
            "weight_map": {key: place.file for key, place in sorted(self.places.items())},
        }
        text = json.dumps(index, indent=2) + "\n"
        (folder / INDEX_FILE).write_text(text, encoding="utf-8")

    def check_written(self, keys: Iterable[str]) -> None:
        """Check that every tensor was written, once; what was not is zeros.

        Args:
            keys: What all writers have written.

        Raises:
            CheckpointError: If one is missing, or was written twice.
        """
        counts = Counter(list(keys))
        wrong = [key for key in self.places if counts[key] != 1]
        if wrong:
            raise CheckpointError(
                f"{len(wrong)} of {len(self.places)} tensors were not written exactly once: "
                f"{listed(wrong)}."
            )


class HubWriter:
    """Puts tensors in their places; several writers may fill one file.

    Args:
        folder: Where `FileLayout.create` has made the files.
        layout: The layout.

    Attributes:
        written: Keys of what it has written.
    """

    def __init__(self, folder: Path, layout: FileLayout) -> None:
        self.written: list[str] = []
        self._folder = folder
        self._layout = layout
        self._files: dict[str, FileIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: Any, _trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            os.fsync(file.fileno())
            file.close()
        self._files.clear()

    def write(self, key: str, tensor: Tensor) -> None:
        """Write one tensor.

        Args:
            key: Its key.
            tensor: Its values, on any device.

        Raises:
            CheckpointError: If it has another type or shape than was planned.
        """
        place = self._layout.places[key]
        if (tensor.dtype, tuple(tensor.shape)) != (place.kind.dtype, place.kind.shape):
            raise CheckpointError(
                f"{key} has dtype={tensor.dtype}, shape={tuple(tensor.shape)}; planned were "
                f"dtype={place.kind.dtype}, shape={place.kind.shape}."
            )
        self.written.append(key)
        if not tensor.numel():
            return
        flat = tensor.detach().cpu().contiguous().view(-1)
        array: Any = flat.view(torch.uint8).numpy()
        buffer = memoryview(array)
        file = self._files.get(place.file)
        if file is None:
            file = self._files[place.file] = FileIO(self._folder / place.file, "r+b")
        file.seek(place.start)
        while len(buffer):
            buffer = buffer[file.write(buffer) :]


def copy_tokenizer(source: Path, folder: Path) -> list[str]:
    """Copy the tokenizer files of a checkpoint.

    Args:
        source: The folder that may have some.
        folder: Where they go.

    Returns:
        Names of the files that were copied.
    """
    found = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, folder / name)
    return found


def _fill_files(tensors: Mapping[str, Shape], max_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    held = 0
    for key, kind in tensors.items():
        size = _nbytes(kind)
        if groups[-1] and held + size > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(key)
        held += size
    return groups


def _nbytes(kind: Shape) -> int:
    return math.prod(kind.shape) * kind.dtype.itemsize
