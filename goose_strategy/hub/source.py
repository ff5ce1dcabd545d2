"""A checkpoint folder of the hub: which tensors its files hold, and any box of any of them.

``safetensors`` maps whole files into memory, so that every page a rank has touched counts as its
own, although it keeps a slice. Here the (public, frozen) header is read, and then just the bytes of
a box, in blocks: a rank needs its own part and one block.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from goose_strategy.errors import CheckpointError, ConfigError
from goose_strategy.mesh.shard import Box

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Names of element types in a safetensors header."""

_BLOCK = 1 << 24
_LARGEST_HEADER = 100_000_000
_DOWNLOADED = ("*.json", "model*.safetensors", "tokenizer*", "*.model", "*.txt", "*.jinja")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class StoredTensor(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        file: The file that holds it.
        dtype: Type of its elements.
        shape: Its shape.
        start: Where its first byte lies in the file; the elements follow in row-major order.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class HubFolder:
    """The safetensors files of one folder, known by their headers.

    Args:
        path: The folder.

    Attributes:
        path: The folder.
        tensors: Every tensor by its key in the files.
        fingerprint: Depends on names, types, shapes and places of all tensors; ranks compare it.

    Raises:
        ConfigError: If there are no safetensors files in it.
        CheckpointError: If a file is missing, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        self.fingerprint = 0
        listed = _files_of(path)
        for name in sorted({*listed.values()} or {SINGLE_FILE}):
            self._add(path / name)
        for key, name in listed.items():
            stored = self.tensors.get(key)
            if stored is None or stored.file.name != name:
                raise CheckpointError(
                    f"'{path / INDEX_FILE}' says that {key} is in {name}, which does not hold it; "
                    "download the checkpoint again."
                )

    def _add(self, file: Path) -> None:
        header, begin, crc32 = _read_header(file)
        size = file.stat().st_size
        self.fingerprint = zlib.crc32(crc32.to_bytes(4, "little"), self.fingerprint)
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            self.tensors[key] = _entry(file, key, entry, begin)
            _check_end(self.tensors[key], key, size)

    def check(self) -> None:
        """Check that the files are still as long as their headers say.

        Raises:
            CheckpointError: If one is missing or truncated.
        """
        sizes: dict[Path, int] = {}
        for file in sorted({stored.file for stored in self.tensors.values()}):
            if not file.is_file():
                raise CheckpointError(f"'{file}' was there when the model was made, and is gone.")
            sizes[file] = file.stat().st_size
        for key, stored in self.tensors.items():
            _check_end(stored, key, sizes[stored.file])

    @contextmanager
    def opened(self) -> Iterator[HubReader]:
        """Open the files for reading inside the block."""
        reader = HubReader(self.tensors)
        try:
            yield reader
        finally:
            reader.close()


class HubReader:
    """Reads boxes of tensors.

    Args:
        tensors: The tensors, by key.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self._files: dict[Path, FileIO] = {}

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def whole(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor, on the host.

        Args:
            key: Its key.
            dtype: Cast to this type; as stored if ``None``.
        """
        stored = self._tensors[key]
        out = torch.empty(stored.shape, dtype=dtype or stored.dtype)
        self.fill(key, Box((0,) * out.dim(), tuple(out.shape)), out)
        return out

    def fill(self, key: str, box: Box, out: Tensor, *, through: torch.dtype | None = None) -> None:
        """Read a box of a tensor into ``out``.

        Args:
            key: The tensor.
            box: Which part of it.
            out: Of the box's shape, on any device and of any type; may be a view.
            through: Cast to this type first, and then to that of ``out``.
        """
        stored = self._tensors[key]
        place = _Place(self._file(stored.file), stored.dtype, through or out.dtype)
        with torch.no_grad():
            if not stored.shape:
                out.copy_(place.load(stored.start, ()))
            elif out.numel():
                _fill(place, stored.start, stored.shape, box, out)

    def _file(self, path: Path) -> FileIO:
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = FileIO(path, "rb")
        return file


class _Place(NamedTuple):
    """A file and the types of what is read from it."""

    file: FileIO
    dtype: torch.dtype
    through: torch.dtype

    def load(self, start: int, shape: tuple[int, ...]) -> Tensor:
        """Read a contiguous block, cast to ``through``."""
        flat = torch.empty(math.prod(shape) * self.dtype.itemsize, dtype=torch.uint8)
        self.read(start, flat)
        return flat.view(self.dtype).view(shape).to(self.through)

    def read(self, start: int, target: Tensor) -> None:
        """Read bytes into a contiguous tensor on the host."""
        array: Any = target.view(-1).view(torch.uint8).numpy()
        buffer = memoryview(array)
        self.file.seek(start)
        while len(buffer):
            count = self.file.readinto(buffer)
            if not count:
                raise CheckpointError(
                    f"'{self.file.name!s}' ends before byte {start + target.nbytes}: it is "
                    "truncated; download it again."
                )
            buffer = buffer[count:]


def _fill(place: _Place, start: int, shape: tuple[int, ...], box: Box, out: Tensor) -> None:
    """Read a box of a non-empty tensor that begins at byte ``start``."""
    row = math.prod(shape[1:]) * place.dtype.itemsize
    first, count = box.offsets[0], box.lengths[0]
    inner = Box(box.offsets[1:], box.lengths[1:])
    if inner.lengths == shape[1:] and out.is_contiguous():
        _fill_run(place, start + first * row, out.view(-1))
    elif row <= _BLOCK:
        step = max(1, _BLOCK // row)
        cut = tuple(slice(a, a + n) for a, n in zip(*inner, strict=True))
        for at in range(0, count, step):
            rows = min(step, count - at)
            block = place.load(start + (first + at) * row, (rows, *shape[1:]))
            out[at : at + rows].copy_(block[(slice(None), *cut)])
    else:
        for at in range(count):
            _fill(place, start + (first + at) * row, shape[1:], inner, out[at])


def _fill_run(place: _Place, start: int, flat: Tensor) -> None:
    """Read elements that follow each other in the file."""
    if flat.device.type == "cpu" and flat.dtype == place.dtype == place.through:
        place.read(start, flat.detach())
        return
    step = _BLOCK // place.dtype.itemsize
    for at in range(0, flat.numel(), step):
        part = flat[at : at + step]
        part.copy_(place.load(start + at * place.dtype.itemsize, tuple(part.shape)))


def find_folder(path_or_id: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """Return the local folder of a checkpoint; download it, or take it from the cache.

    Args:
        path_or_id: A folder, or a repository of the hub (``"owner/name"``).
        revision: Branch, tag or commit of the repository; its main branch if ``None``.

    Returns:
        The folder.

    Raises:
        ConfigError: If there is neither such a folder nor such a repository.
    """
    text = os.fspath(path_or_id)
    folder = Path(text).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or text.startswith((".", "~", os.sep)) or text.count("/") > 1:
        raise ConfigError(
            f"path_or_id={text!r} is no folder; give the folder that holds config.json and the "
            f"*.safetensors files, or a repository of the hub as 'owner/name'."
        )
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(text, revision=revision, allow_patterns=list(_DOWNLOADED))
    except Exception as err:
        first_line = str(err).strip().splitlines()[0] if str(err).strip() else ""
        raise ConfigError(
            f"path_or_id={text!r}, revision={revision!r} is neither a folder nor a repository that "
            f"can be downloaded or found in the cache: {type(err).__name__}: {first_line}"
        ) from err
    return Path(found)


def _files_of(path: Path) -> dict[str, str]:
    """Return file by key as the index has it; empty where a single file holds everything."""
    if (path / SINGLE_FILE).is_file():
        return {}
    index = path / INDEX_FILE
    if not index.is_file():
        _refuse_without_files(path)
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(key): str(name) for key, name in listed.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as err:
        raise CheckpointError(f"'{index}' is damaged: {type(err).__name__}: {err}") from err
    for name in sorted({*names.values()}):
        if Path(name).name != name:
            raise CheckpointError(f"'{index}' names {name!r}, which is no file of this folder.")
    return names


def _refuse_without_files(path: Path) -> None:
    if any((path / name).is_file() for name in _PICKLED):
        raise ConfigError(
            f"'{path}' holds pytorch_model.bin files, which have to be unpickled as a whole. "
            'Convert them once: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{path}').save_pretrained('NEW_FOLDER')\""
        )
    raise ConfigError(f"'{path}' holds neither {SINGLE_FILE} nor {INDEX_FILE}.")


def _read_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """Return the header of a file, where its data begins, and a checksum of the header."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            raw = stream.read(length) if length <= _LARGEST_HEADER else b""
    except FileNotFoundError as err:
        raise CheckpointError(f"'{file}' is missing; download the checkpoint again.") from err
    try:
        header = json.loads(raw)
    except ValueError:
        header = None
    if len(raw) != length or not isinstance(header, dict):
        raise CheckpointError(
            f"'{file}' is no safetensors file, or is truncated: its header should have "
            f"{length} bytes."
        )
    return header, 8 + length, zlib.crc32(raw)


def _entry(file: Path, key: str, entry: Any, begin: int) -> StoredTensor:
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(
            f"'{file}': {key} has dtype={entry['dtype']!r}, which is not known here; known are "
            f"{', '.join(DTYPES)}."
        )
    start, end = entry["data_offsets"]
    stored = StoredTensor(file, dtype, tuple(entry["shape"]), begin + start)
    if end - start != math.prod(stored.shape) * dtype.itemsize:
        raise CheckpointError(
            f"'{file}': {key} has {end - start} bytes, which is not {entry['dtype']} of "
            f"shape={stored.shape}; the file is damaged."
        )
    return stored


def _check_end(stored: StoredTensor, key: str, size: int) -> None:
    end = stored.start + math.prod(stored.shape) * stored.dtype.itemsize
    if end > size:
        raise CheckpointError(
            f"'{stored.file}' has size={size} bytes, but {key} ends at {end}: it is truncated; "
            "download it again."
        )
