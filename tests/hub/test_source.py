"""Any box of any tensor, in any type, and a word for every file that is not as it should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from goose_strategy.errors import CheckpointError, ConfigError
from goose_strategy.hub import source
from goose_strategy.hub.source import INDEX_FILE, SINGLE_FILE, HubFolder, find_folder
from goose_strategy.mesh.shard import Box
from tests.hub.checkpoints import box_of, refused, truncate

BOXES = [
    ((0, 0, 0), (6, 5, 4)),
    ((2, 0, 0), (3, 5, 4)),
    ((0, 1, 0), (6, 3, 4)),
    ((1, 2, 3), (4, 2, 1)),
    ((0, 0, 0), (0, 5, 4)),
]


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, Tensor]:
    tensors = {
        "cube": torch.arange(120.0).reshape(6, 5, 4),
        "half": torch.randn(7, 3).bfloat16(),
        "whole numbers": torch.arange(6).reshape(2, 3),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / SINGLE_FILE)
    return tensors


@pytest.mark.parametrize("block", [source._BLOCK, 64, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_box_is_read_in_blocks_of_any_size(
    tmp_path: Path,
    stored: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    block: int,
    dtype: torch.dtype,
) -> None:
    # 20 bytes is less than a row of 5 x 4 numbers, and just a row of 5.
    monkeypatch.setattr(source, "_BLOCK", block)
    with HubFolder(tmp_path).opened() as reader:
        for offsets, lengths in BOXES:
            out = torch.full(lengths, -1.0, dtype=dtype)
            reader.fill("cube", Box(offsets, lengths), out)
            assert torch.equal(out, box_of(stored["cube"], offsets, lengths).to(dtype))
            strided = torch.full((*lengths[:2], 9), -1.0, dtype=dtype)
            reader.fill("cube", Box(offsets, lengths), strided[..., 3 : 3 + lengths[2]])
            assert torch.equal(strided[..., 3 : 3 + lengths[2]], out)
            assert bool((strided[..., :3] == -1).all())


def test_every_type_comes_back_as_it_was(tmp_path: Path, stored: dict[str, Tensor]) -> None:
    with HubFolder(tmp_path).opened() as reader:
        for key, tensor in stored.items():
            assert reader.whole(key).dtype == tensor.dtype
            assert torch.equal(reader.whole(key), tensor)


def test_a_cast_goes_through_the_type_that_was_asked_for(tmp_path: Path) -> None:
    value = torch.tensor([1.0 + 2.0**-12])
    save_file({"x": value}, tmp_path / SINGLE_FILE)
    out = torch.empty(1, dtype=torch.float64)
    with HubFolder(tmp_path).opened() as reader:
        reader.fill("x", Box((0,), (1,)), out, through=torch.bfloat16)
    assert out.item() == 1.0


def test_several_files_are_one_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    folder = HubFolder(tmp_path)
    assert {key: stored.shape for key, stored in folder.tensors.items()} == {"a": (2,), "b": (3,)}
    with folder.opened() as reader:
        assert torch.equal(reader.whole("b"), torch.zeros(3))


def test_another_header_has_another_fingerprint(tmp_path: Path) -> None:
    marks = []
    for size in (2, 3):
        save_file({"a": torch.ones(size)}, tmp_path / SINGLE_FILE)
        marks.append(HubFolder(tmp_path).fingerprint)
    assert marks[0] != marks[1]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / SINGLE_FILE
    save_file({"a": torch.ones(4)}, file)
    folder = HubFolder(tmp_path)
    truncate(file)
    with refused(CheckpointError, "a ends at", "truncated"):
        HubFolder(tmp_path)
    with refused(CheckpointError, "truncated"):
        folder.check()
    with folder.opened() as reader, refused(CheckpointError, "truncated"):
        reader.whole("a")
    file.write_bytes(b"\x00" * 4)
    with refused(CheckpointError, "no safetensors file"):
        HubFolder(tmp_path)
    # A report of the wild: a zero-byte file where a tied head should have been.
    file.write_bytes(b"")
    with refused(CheckpointError, "no safetensors file"):
        HubFolder(tmp_path)
    file.unlink()
    with refused(CheckpointError, "is gone"):
        folder.check()


def test_a_wrong_index_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = tmp_path / INDEX_FILE
    index.write_text(json.dumps({"weight_map": {"b": "one.safetensors"}}))
    with refused(CheckpointError, "b is in one.safetensors, which does not hold it"):
        HubFolder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    with refused(CheckpointError, "no file of this folder"):
        HubFolder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "two.safetensors"}}))
    with refused(CheckpointError, "two.safetensors' is missing"):
        HubFolder(tmp_path)
    index.write_text("[]")
    with refused(CheckpointError, "is damaged"):
        HubFolder(tmp_path)


def test_folders_without_safetensors_are_refused(tmp_path: Path) -> None:
    with refused(ConfigError, SINGLE_FILE):
        HubFolder(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with refused(ConfigError, "save_pretrained"):
        HubFolder(tmp_path)


def test_a_repository_is_found_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "models--owner--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    assert find_folder("owner/name") == snapshot
    with refused(ConfigError, "revision='other'", "neither a folder nor a repository"):
        find_folder("owner/name", revision="other")


def test_a_wrong_path_is_no_repository(tmp_path: Path) -> None:
    with refused(ConfigError, "is no folder"):
        find_folder(tmp_path / "absent")
    (tmp_path / "file").touch()
    with refused(ConfigError, "is no folder"):
        find_folder(tmp_path / "file")
    assert find_folder(tmp_path) == tmp_path
