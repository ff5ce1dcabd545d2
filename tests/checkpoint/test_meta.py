from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from goose_strategy.checkpoint.files import FileRecord
from goose_strategy.checkpoint.folder import META_FILE, PICKLED_FILE
from goose_strategy.checkpoint.meta import (
    Record,
    load_meta,
    load_pickled,
    split,
    write_meta,
    write_pickled,
)
from goose_strategy.errors import CheckpointError
from goose_strategy.mesh.layout import MeshLayout


class Colour(enum.Enum):
    RED = 1


@dataclass
class Settings:
    rate: float


SAFE: dict[str, Any] = {
    "epoch": 3,
    "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
    "callbacks": {"ModelCheckpoint{}": {"best_model_score": torch.tensor(1.5), "dirpath": "a"}},
    "lr_schedulers": [{"base_lrs": [0.1], "last_epoch": 4, "_step_count": 5, "verbose": None}],
    "tuple": (1, "two", None, 3.0, {4, 5}, b"six", OrderedDict(seven=8), torch.bfloat16),
}
UNSAFE: dict[str, Any] = {
    "hyper_parameters": {"path": Path("/data"), "nested": [Settings(0.1)], "colour": Colour.RED},
    "score": np.float64(0.25),
    "kind": dict,
}


def record(**changes: Any) -> Record:
    given: dict[str, Any] = {
        "layout": MeshLayout(tp=2, pp=1, dp=3),
        "identity": {"class": "Toy"},
        "files": {"__0_0.distcp": FileRecord(12, 34)},
        "aliases": {"model.head": "model.embed"},
    }
    return Record(**{**given, **changes})


def test_split_tells_what_weights_only_loads() -> None:
    safe, pickled, obstacles = split({**SAFE, **UNSAFE})
    assert safe.keys() == SAFE.keys()
    assert pickled.keys() == UNSAFE.keys() == obstacles.keys()
    assert "PosixPath" in obstacles["hyper_parameters"]
    assert "Settings" in obstacles["hyper_parameters"]
    assert "numpy" in obstacles["score"]


def test_split_leaves_out_what_only_this_process_allows() -> None:
    with torch.serialization.safe_globals([Settings]):
        allowed = set(torch.serialization.get_safe_globals())
        _, pickled, _ = split({"settings": Settings(1.0)})
        assert set(torch.serialization.get_safe_globals()) == allowed
    assert pickled == {"settings": Settings(1.0)}


def test_split_names_what_cannot_be_saved() -> None:
    with pytest.raises(CheckpointError, match="'hook' of type function cannot be saved"):
        split({"hook": lambda: None})
    with pytest.raises(CheckpointError, match="the name is taken"):
        split({"goose3d": 1})


def write(folder: Path) -> Record:
    safe, pickled, obstacles = split({**SAFE, **UNSAFE})
    files = write_pickled(folder, pickled)
    written = record(files=files, pickled=obstacles)
    write_meta(folder, safe, written)
    return written


def test_everything_comes_back(tmp_path: Path) -> None:
    written = write(tmp_path)
    entries, read = load_meta(tmp_path)
    assert read == written
    assert entries == SAFE
    assert torch.load(tmp_path / META_FILE, weights_only=True).keys() == {*SAFE, "goose3d"}
    assert load_pickled(tmp_path, read, weights_only=False) == UNSAFE


@pytest.mark.parametrize("weights_only", [True, None])
def test_weights_only_refuses_and_says_which_entries(
    tmp_path: Path, weights_only: bool | None
) -> None:
    read = write(tmp_path)
    said = rf"weights_only={weights_only} refuses.*'hyper_parameters' \(.*PosixPath.*weights_only=F"
    with pytest.raises(CheckpointError, match=said):
        load_pickled(tmp_path, read, weights_only=weights_only)


def test_the_default_is_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = write(tmp_path)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with pytest.warns(UserWarning, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        assert load_pickled(tmp_path, read, weights_only=None) == UNSAFE


def test_weights_only_takes_what_the_user_allows(tmp_path: Path) -> None:
    _, pickled, obstacles = split({"settings": Settings(1.0)})
    read = record(files=write_pickled(tmp_path, pickled), pickled=obstacles)
    with torch.serialization.safe_globals([Settings]):
        assert load_pickled(tmp_path, read, weights_only=True) == {"settings": Settings(1.0)}


def test_without_unsafe_entries_there_is_no_second_file(tmp_path: Path) -> None:
    assert write_pickled(tmp_path, {}) == {}
    assert not (tmp_path / PICKLED_FILE).exists()
    assert load_pickled(tmp_path, record(), weights_only=True) == {}


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    write_meta(tmp_path, {}, record(format=2))
    with pytest.raises(CheckpointError, match="format=2, this version reads format=1"):
        load_meta(tmp_path)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    write(tmp_path)
    good = load_meta(tmp_path)[1]
    file = tmp_path / META_FILE
    data = file.read_bytes()
    survived = 0
    for at in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        file.write_bytes(damaged)
        try:
            entries, read = load_meta(tmp_path)
        except CheckpointError:
            continue
        survived += 1
        assert (entries, read) == (SAFE, good)
    # The zip format has padding and dates, which carry nothing.
    assert survived < len(data) / 7 / 2


def test_descriptions_of_models_are_kept_and_old_records_have_none(tmp_path: Path) -> None:
    models = {"model": [{"prefix": "lm", "transforms": None, "names": ("a", "b")}]}
    write_meta(tmp_path, {}, record(models=models))
    _, read = load_meta(tmp_path)
    assert read.models == models
    old = record().plain()
    del old["models"]
    assert Record.parse(old, tmp_path).models == {}
