"""Files that are filled in any order are those that safetensors would have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from goose_strategy.errors import CheckpointError
from goose_strategy.hub.outline import Shape
from goose_strategy.hub.source import INDEX_FILE, SINGLE_FILE
from goose_strategy.hub.write import FileLayout, HubWriter, copy_tokenizer
from tests.hub.checkpoints import refused

TENSORS: dict[str, Tensor] = {
    "flags": torch.tensor([True, False, True]),
    "a.weight": torch.randn(5, 3).bfloat16(),
    "b.weight": torch.randn(4, 4, dtype=torch.float64),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "c.weight": torch.randn(6, 2),
}


def layout_of(max_bytes: int) -> FileLayout:
    return FileLayout({k: Shape(t.dtype, tuple(t.shape)) for k, t in TENSORS.items()}, max_bytes)


@pytest.mark.parametrize("max_bytes", [10**9, 100, 1])
def test_safetensors_reads_what_two_writers_wrote(tmp_path: Path, max_bytes: int) -> None:
    layout = layout_of(max_bytes)
    layout.create(tmp_path)
    keys = list(reversed(TENSORS))
    with HubWriter(tmp_path, layout) as one, HubWriter(tmp_path, layout) as two:
        for number, key in enumerate(keys):
            (one, two)[number % 2].write(key, TENSORS[key])
    layout.check_written([*one.written, *two.written])
    files = sorted(tmp_path.glob("*.safetensors"))
    found = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert found.keys() == TENSORS.keys()
    for key, tensor in TENSORS.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor)
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    if max_bytes == 10**9:
        assert [file.name for file in files] == [SINGLE_FILE]
        assert not (tmp_path / INDEX_FILE).exists()
        return
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {
        "total_size": sum(tensor.nbytes for tensor in TENSORS.values()),
        "total_parameters": sum(tensor.numel() for tensor in TENSORS.values()),
        "format": "pt",
    }
    for key, name in index["weight_map"].items():
        assert key in load_file(tmp_path / name)
    data = [sum(t.nbytes for t in load_file(file).values()) for file in files]
    assert all(size <= max(max_bytes, 128) for size in data)
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"


def test_another_tensor_than_planned_is_refused(tmp_path: Path) -> None:
    layout = layout_of(10**9)
    layout.create(tmp_path)
    with HubWriter(tmp_path, layout) as writer:
        with refused(CheckpointError, "c.weight", "planned were", "(6, 2)"):
            writer.write("c.weight", torch.randn(2, 6))
        with refused(CheckpointError, "dtype=torch.float64"):
            writer.write("c.weight", torch.randn(6, 2, dtype=torch.float64))


def test_what_was_not_written_is_noticed() -> None:
    layout = layout_of(10**9)
    layout.check_written(TENSORS)
    with refused(CheckpointError, "1 of 6 tensors", "scalar"):
        layout.check_written([key for key in TENSORS if key != "scalar"])
    with refused(CheckpointError, "not written exactly once", "flags"):
        layout.check_written([*TENSORS, "flags"])


def test_tokenizer_files_are_copied(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    assert copy_tokenizer(source, target) == []
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_text("no")
    assert copy_tokenizer(source, target) == ["tokenizer.json"]
    assert [file.name for file in target.iterdir()] == ["tokenizer.json"]
