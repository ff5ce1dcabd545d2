"""Both kinds of checkpoint, opened by one process; `test_load` opens them by many."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from goose_strategy.checkpoint.manifest import EntryPath, LocalTensor
from goose_strategy.checkpoint.meta import Record
from goose_strategy.checkpoint.opened import (
    Checkpoint,
    ShardedCheckpoint,
    SingleFileCheckpoint,
    StoredTensor,
    load_single_file,
)
from goose_strategy.checkpoint.planner import BoxSavePlanner
from goose_strategy.checkpoint.storage import METADATA_FILE, CheckedWriter
from goose_strategy.errors import CheckpointError
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.shard import Box

# DCP says so whenever it saves without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SHARD = "__0_0.distcp"
WEIGHT = torch.arange(24.0).view(4, 6)
STEP = torch.tensor(3.0)
MOMENT = WEIGHT.double() / 7
GROUPS = [{"lr": 0.5, "betas": (0.9, 0.95), "params": ["w"]}, {"lr": 0.25, "params": []}]
WEIGHT_PATH: EntryPath = ("model", "w")
STEP_PATH: EntryPath = ("optimizer_0", "state", "w", "step")
MOMENT_PATH: EntryPath = ("optimizer_0", "state", "w", "exp_avg")
TENSORS = {WEIGHT_PATH: WEIGHT, STEP_PATH: STEP, MOMENT_PATH: MOMENT}
LISTED = {
    "model.w": StoredTensor(WEIGHT_PATH, (4, 6), torch.float32),
    "optimizer_0.state.w.step": StoredTensor(STEP_PATH, (), torch.float32),
    "optimizer_0.state.w.exp_avg": StoredTensor(MOMENT_PATH, (4, 6), torch.float64),
}
OBJECTS = {
    ("optimizer_0", "param_groups", at, name): value
    for at, group in enumerate(GROUPS)
    for name, value in group.items()
}


def local(path: EntryPath, tensor: Tensor) -> LocalTensor:
    """A tensor in two boxes, so that reading has to put it together."""
    if tensor.dim() == 0:
        return LocalTensor.whole(path, tensor)
    boxes = Box((0, 0), (4, 2)), Box((0, 2), (4, 4))
    pieces = ((boxes[0], tensor[:, :2]), (boxes[1], tensor[:, 2:]))
    aliases: tuple[EntryPath, ...] = (("model", "head"),) if path == WEIGHT_PATH else ()
    return LocalTensor(path, tuple(tensor.shape), tensor.dtype, pieces, aliases=aliases)


def save_folder(path: Path, objects: dict[Any, Any] = OBJECTS) -> Record:
    planner = BoxSavePlanner([local(*item) for item in TENSORS.items()], objects)
    writer = CheckedWriter(path, planner.aliases)
    dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    return Record(
        layout=MeshLayout(tp=1, pp=1, dp=1),
        identity={"class": "Toy"},
        files=writer.records,
        aliases={alias: key for key, names in planner.aliases.items() for alias in names},
    )


def open_folder(path: Path, objects: dict[Any, Any] = OBJECTS) -> ShardedCheckpoint:
    return ShardedCheckpoint(path, {"epoch": 1}, save_folder(path, objects))


def content() -> dict[str, Any]:
    """What the Trainer of one process saves."""
    state = {"w": {"step": STEP, "exp_avg": MOMENT}}
    return {
        "epoch": 1,
        "state_dict": {"w": WEIGHT},
        "optimizer_states": [{"state": state, "param_groups": GROUPS}],
    }


def open_file(path: Path) -> SingleFileCheckpoint:
    torch.save(content(), path / "single.ckpt")
    return load_single_file(path / "single.ckpt", weights_only=True)


@pytest.fixture(params=["folder", "file"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    return open_folder(tmp_path) if request.param == "folder" else open_file(tmp_path)


def wanted(path: EntryPath, *boxes: Box, dtype: torch.dtype = torch.float32) -> LocalTensor:
    pieces = tuple((box, torch.full(box.lengths, -1, dtype=dtype)) for box in boxes)
    return LocalTensor(path, (4, 6), dtype, pieces)


def test_both_kinds_list_the_same_tensors(opened: Checkpoint) -> None:
    # The folder knows the tied weight by its second name, too.
    head = opened.tensors.pop("model.head", None)
    assert opened.tensors == LISTED
    expected = StoredTensor(("model", "head"), (4, 6), torch.float32)
    assert head == (expected if isinstance(opened, ShardedCheckpoint) else None)


def test_both_kinds_fill_boxes_that_nobody_wrote(opened: Checkpoint) -> None:
    inner = wanted(WEIGHT_PATH, Box((1, 1), (2, 4)), Box((3, 0), (1, 6)), Box((0, 2), (0, 3)))
    moment = wanted(MOMENT_PATH, Box((0, 0), (4, 6)), dtype=torch.bfloat16)
    step = LocalTensor.whole(STEP_PATH, torch.tensor(0.0))
    destinations = [inner, moment, step]
    opened.plan(destinations)
    assert all((piece <= 0).all() for tensor in destinations for _, piece in tensor.pieces)
    opened.read(destinations)
    assert torch.equal(inner.pieces[0][1], WEIGHT[1:3, 1:5])
    assert torch.equal(inner.pieces[1][1], WEIGHT[3:])
    assert torch.equal(moment.pieces[0][1], MOMENT.bfloat16())
    assert step.pieces[0][1] == STEP


def test_parameters_are_filled_in_place(opened: Checkpoint) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    opened.read([LocalTensor.whole(WEIGHT_PATH, parameter)])
    assert torch.equal(parameter.detach(), WEIGHT)
    assert parameter.is_leaf and parameter.requires_grad


def test_objects_are_nested_once_they_are_loaded(opened: Checkpoint) -> None:
    assert opened.read_objects("optimizer_0") == {}
    opened.load_objects()
    assert opened.read_objects("optimizer_0") == {"param_groups": GROUPS}
    assert opened.read_objects("optimizer_1") == {}


def test_a_folder_says_who_wrote_it(tmp_path: Path) -> None:
    checkpoint = open_folder(tmp_path)
    assert checkpoint.path == tmp_path
    assert checkpoint.meta == {"epoch": 1}
    assert checkpoint.identity == {"class": "Toy"}
    assert checkpoint.aliases == {"model.head": "model.w"}


def test_an_alias_reads_the_bytes_of_its_tensor(tmp_path: Path) -> None:
    checkpoint = open_folder(tmp_path)
    head = wanted(("model", "head"), Box((1, 1), (3, 3)))
    checkpoint.read([head])
    assert torch.equal(head.pieces[0][1], WEIGHT[1:, 1:4])


def damage(file: Path, kind: str) -> None:
    data = bytearray(file.read_bytes())
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


@pytest.mark.parametrize("name", [SHARD, METADATA_FILE])
@pytest.mark.parametrize(
    ("kind", "said"),
    [("missing", "is missing"), ("truncated", "has size="), ("flipped", "has crc32=")],
)
def test_a_damaged_file_is_found_by_the_part_it_belongs_to(
    tmp_path: Path, name: str, kind: str, said: str
) -> None:
    checkpoint = open_folder(tmp_path)
    checkpoint.verify(part=0, parts=1, checksum=True)
    damage(tmp_path / name, kind)
    found = []
    for part in range(3):
        try:
            checkpoint.verify(part=part, parts=3, checksum=True)
        except CheckpointError as err:
            found.append(str(err))
    assert len(found) == 1
    assert f"{name} {said}" in found[0]
    if kind == "flipped":
        checkpoint.verify(part=0, parts=1, checksum=False)


def test_a_folder_refuses_elements_that_it_lacks(tmp_path: Path) -> None:
    checkpoint = open_folder(tmp_path)
    del checkpoint._metadata.state_dict_metadata["model.w"].chunks[0]
    destination = wanted(WEIGHT_PATH, Box((0, 0), (4, 6)))
    for step in (checkpoint.plan, checkpoint.read):
        with pytest.raises(CheckpointError, match=r"model\.w: the checkpoint holds \d+ of the 24"):
            step([destination])
    assert (destination.pieces[0][1] == -1).all()


def test_a_folder_runs_no_code_for_its_objects(tmp_path: Path) -> None:
    checkpoint = open_folder(tmp_path, {("optimizer_0", "home"): Path("/home")})
    with pytest.raises(pickle.UnpicklingError, match="PosixPath"):
        checkpoint.load_objects()
    assert checkpoint.objects == {}


def test_the_trainers_names_become_those_of_a_folder(tmp_path: Path) -> None:
    both = [{"state": {"w": {"step": torch.tensor(float(n))}}, "param_groups": []} for n in (4, 5)]
    given = {"state_dict": {"a.b": WEIGHT}, "optimizer_states": both, "epoch": 2}
    checkpoint = SingleFileCheckpoint(tmp_path, given)
    keys = {"model.a.b", "optimizer_0.state.w.step", "optimizer_1.state.w.step"}
    assert checkpoint.tensors.keys() == keys
    assert checkpoint.tensors["model.a.b"].path == ("model", "a.b")
    last = LocalTensor.whole(("optimizer_1", "state", "w", "step"), torch.tensor(0.0))
    checkpoint.read([last])
    assert last.pieces[0][1] == 5.0
    # The user's own view of the file keeps the Trainer's names.
    assert checkpoint.meta is given
    assert given.keys() == {"state_dict", "optimizer_states", "epoch"}


def test_a_model_of_the_users_own_keeps_its_name(tmp_path: Path) -> None:
    given = {"model": {"w": WEIGHT}, "state_dict": {"w": STEP}}
    checkpoint = SingleFileCheckpoint(tmp_path, given)
    assert checkpoint.tensors.keys() == {"model.w", "state_dict.w"}
    assert checkpoint.tensors["model.w"].shape == (4, 6)


def test_a_single_file_has_no_record_to_verify(tmp_path: Path) -> None:
    checkpoint = open_file(tmp_path)
    checkpoint.verify(part=0, parts=1, checksum=True)
    assert checkpoint.identity == {} == checkpoint.aliases
    assert checkpoint.meta["epoch"] == 1


@pytest.mark.parametrize("weights_only", [True, None])
def test_a_single_file_with_other_classes_needs_trust(
    tmp_path: Path, weights_only: bool | None
) -> None:
    file = tmp_path / "single.ckpt"
    torch.save({**content(), "home": Path("/home")}, file)
    with pytest.raises(
        CheckpointError, match=rf"cannot be loaded with weights_only={weights_only}"
    ):
        load_single_file(file, weights_only=weights_only)
    assert load_single_file(file, weights_only=False).meta["home"] == Path("/home")


@pytest.mark.parametrize("keep", [0, 100, -30], ids=["empty", "start", "almost"])
def test_a_truncated_single_file_is_named(tmp_path: Path, keep: int) -> None:
    open_file(tmp_path)
    file = tmp_path / "single.ckpt"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        CheckpointError, match=r"single\.ckpt' cannot be loaded with weights_only=T"
    ):
        load_single_file(file, weights_only=True)


def test_a_single_file_without_a_dict_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save([WEIGHT], tmp_path / "list")
    with pytest.raises(CheckpointError, match="holds a list, not a checkpoint"):
        load_single_file(tmp_path / "list", weights_only=True)
