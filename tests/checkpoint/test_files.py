from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from goose_strategy.checkpoint import files
from goose_strategy.checkpoint.files import FileRecord, check_file, checksum_of
from goose_strategy.errors import CheckpointError

NAME = "__0_0.distcp"
DATA = bytes(range(256)) * 5
GOOD = FileRecord(len(DATA), zlib.crc32(DATA))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / NAME).write_bytes(DATA)
    return tmp_path


@pytest.mark.parametrize("block", [1, 7, 640, len(DATA), 1 << 22])
def test_the_checksum_does_not_depend_on_the_blocks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(files, "BLOCK", block)
    assert checksum_of(folder / NAME) == zlib.crc32(DATA)


def test_an_empty_file_has_a_record_too(tmp_path: Path) -> None:
    (tmp_path / NAME).touch()
    assert checksum_of(tmp_path / NAME) == 0
    check_file(tmp_path, NAME, FileRecord(0, 0), checksum=True)


@pytest.mark.parametrize("checksum", [True, False])
def test_a_file_as_it_was_written_passes(folder: Path, checksum: bool) -> None:
    check_file(folder, NAME, GOOD, checksum=checksum)
    assert (folder / NAME).read_bytes() == DATA


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("kind", ["nothing", "folder", "broken link"])
def test_a_missing_file_is_named_with_its_size(tmp_path: Path, kind: str, checksum: bool) -> None:
    if kind == "folder":
        (tmp_path / NAME).mkdir()
    elif kind == "broken link":
        (tmp_path / NAME).symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=rf"{NAME} is missing; expected a file of size=1280 "):
        check_file(tmp_path, NAME, GOOD, checksum=checksum)


@pytest.mark.parametrize("checksum", [True, False])
@pytest.mark.parametrize("data", [b"", DATA[:-1], DATA + b"\0"], ids=["empty", "short", "long"])
def test_another_size_is_found_without_reading(folder: Path, data: bytes, checksum: bool) -> None:
    (folder / NAME).write_bytes(data)
    said = rf"{NAME} has size={len(data)} bytes, expected size=1280: it was truncated or overwr"
    with pytest.raises(CheckpointError, match=said):
        check_file(folder, NAME, GOOD, checksum=checksum)


@pytest.mark.parametrize("at", [0, 639, len(DATA) - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_found_by_the_checksum_alone(folder: Path, at: int, bit: int) -> None:
    damaged = bytearray(DATA)
    damaged[at] ^= 1 << bit
    (folder / NAME).write_bytes(damaged)
    check_file(folder, NAME, GOOD, checksum=False)
    found, expected = f"{zlib.crc32(damaged):#010x}", f"{GOOD.crc32:#010x}"
    said = rf"{NAME} has crc32={found}, expected crc32={expected}: its contents were changed"
    with pytest.raises(CheckpointError, match=said):
        check_file(folder, NAME, GOOD, checksum=True)


def test_blocks_in_another_order_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 128)
    swapped = DATA[128:256] + DATA[:128] + DATA[256:]
    (folder / NAME).write_bytes(swapped)
    with pytest.raises(CheckpointError, match="its contents were changed"):
        check_file(folder, NAME, GOOD, checksum=True)
