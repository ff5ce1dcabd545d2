from __future__ import annotations

import os
import pickle
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from goose_strategy.checkpoint.files import FileRecord, check_file, checksum_of
from goose_strategy.checkpoint.storage import METADATA_FILE, CheckedWriter, SafeReader
from goose_strategy.errors import CheckpointError

STATE = {
    "model": {
        str(dtype): torch.arange(6).to(dtype).view(2, 3)
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
    },
    "groups": [{"lr": 0.1}],
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_record_is_what_lies_on_disk(tmp_path: Path) -> None:
    writer = CheckedWriter(tmp_path, {})
    dcp.save(dict(STATE), storage_writer=writer, no_dist=True)
    assert set(writer.records) == {"__0_0.distcp", METADATA_FILE}
    for name, record in writer.records.items():
        data = (tmp_path / name).read_bytes()
        assert record == FileRecord(len(data), zlib.crc32(data))
        check_file(tmp_path, name, record, checksum=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_puts_nothing_else_into_its_metadata(tmp_path: Path) -> None:
    """Fails when a release of torch adds a class to ``.metadata``: `_METADATA_GLOBALS` lists it."""
    dcp.save(dict(STATE), checkpoint_id=tmp_path, no_dist=True)
    ours, theirs = SafeReader(tmp_path), dcp.FileSystemReader(tmp_path)
    read, expected = ours.read_metadata(), theirs.read_metadata()
    assert read.state_dict_metadata == expected.state_dict_metadata
    assert read.storage_data == expected.storage_data


class Exploit:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def test_foreign_code_in_metadata_is_refused(tmp_path: Path) -> None:
    for value in (Exploit(), Metadata({}, planner_data=Exploit())):
        (tmp_path / METADATA_FILE).write_bytes(pickle.dumps(value))
        with pytest.raises(CheckpointError, match=r"names posix\.system, which DCP does not put"):
            SafeReader(tmp_path).read_metadata()
    (tmp_path / METADATA_FILE).write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match="holds a dict"):
        SafeReader(tmp_path).read_metadata()


def test_dotted_names_reach_nothing_through_an_allowed_module(tmp_path: Path) -> None:
    code = b"\x80\x04\x8c\x27torch.distributed.checkpoint.filesystem\x8c\x09os.system\x93."
    (tmp_path / METADATA_FILE).write_bytes(code)
    with pytest.raises(CheckpointError, match=r"os\.system, which DCP"):
        SafeReader(tmp_path).read_metadata()


def test_check_file_names_the_file_and_both_sizes(tmp_path: Path) -> None:
    file = tmp_path / "shard"
    file.write_bytes(b"12345")
    good = FileRecord(5, checksum_of(file))
    check_file(tmp_path, "shard", good, checksum=True)
    with pytest.raises(CheckpointError, match=r"shard has size=5 bytes, expected size=6"):
        check_file(tmp_path, "shard", good._replace(size=6), checksum=False)
    file.write_bytes(b"12346")
    check_file(tmp_path, "shard", good, checksum=False)
    with pytest.raises(CheckpointError, match=r"shard has crc32=0x\w+, expected crc32=0x\w+"):
        check_file(tmp_path, "shard", good, checksum=True)
    file.unlink()
    with pytest.raises(CheckpointError, match="shard is missing; expected a file of size=5"):
        check_file(tmp_path, "shard", good, checksum=False)
