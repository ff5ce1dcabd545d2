from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from goose_strategy.checkpoint import folder
from goose_strategy.checkpoint.load import load_tensors, open_checkpoint
from goose_strategy.checkpoint.manifest import LocalTensor
from goose_strategy.checkpoint.planner import BoxSavePlanner
from goose_strategy.checkpoint.save import Contents, save_checkpoint
from goose_strategy.mesh.shard import Box
from tests.checkpoint.toy import (
    BUFFER,
    EMBED,
    HEAD,
    SHAPES,
    Toy,
    attempt,
    make_mesh,
    same,
    save_toy,
    whole,
)  # fmt: skip
from tests.harness.world import RankFailure, run_ranks


@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 1)], ids=str)
def test_lightning_consolidates_it_into_one_file_with_whole_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int, int]
) -> None:
    path = tmp_path / "step=3.ckpt"
    tp, pp, dp = sizes
    run_ranks(save_toy, tp * pp * dp, sizes, path)
    monkeypatch.setattr(sys, "argv", ["consolidate", str(path)])
    # runpy warns of a module that is imported already, as another test may have done.
    monkeypatch.delitem(
        sys.modules, "lightning.fabric.utilities.consolidate_checkpoint", raising=False
    )
    runpy.run_module("lightning.fabric.utilities.consolidate_checkpoint", run_name="__main__")
    single = torch.load(tmp_path / "step=3.ckpt.consolidated", weights_only=True)

    assert single["step"] == 3
    model, optimizer = single["model"], single["optimizer"]
    assert model.keys() == {*SHAPES, BUFFER, HEAD}
    assert torch.equal(model[HEAD], whole(EMBED))
    assert optimizer["state"].keys() == SHAPES.keys()
    for name in SHAPES:
        assert torch.equal(model[name], whole(name))
        state = optimizer["state"][name]
        assert torch.equal(state["exp_avg"], whole(name, tag="exp_avg"))
        assert torch.equal(state["exp_avg_sq"], whole(name, tag="exp_avg_sq"))
        assert torch.equal(state["step"], torch.tensor(3.0))
    group = {"lr": 0.5, "betas": (0.9, 0.95), "fused": None, "params": list(SHAPES)}
    assert optimizer["param_groups"] == [group]


def test_the_single_file_loads_into_plain_torch(tmp_path: Path) -> None:
    from lightning.fabric.utilities.load import _load_distributed_checkpoint

    path = tmp_path / "checkpoint"
    run_ranks(save_toy, 4, (2, 1, 2), path)
    state = _load_distributed_checkpoint(path)["optimizer"]
    parameters = [torch.nn.Parameter(whole(name)) for name in SHAPES]
    optimizer = torch.optim.AdamW(parameters)
    optimizer.load_state_dict(state)
    for name, parameter in zip(SHAPES, parameters, strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], whole(name, tag="exp_avg"))


def test_a_tied_weight_lies_on_disk_once(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    run_ranks(save_toy, 2, (1, 2, 1), path)
    metadata = FileSystemReader(path).read_metadata()
    places = {
        index.fqn: (info.relative_path, info.offset)
        for index, info in metadata.storage_data.items()
        if index.fqn in (f"model.{EMBED}", f"model.{HEAD}")
    }
    assert len(places) == 2
    assert len(set(places.values())) == 1


def test_replicas_divide_the_writing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    run_ranks(save_toy, 4, (1, 1, 4), path)
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) < 1.5 * min(sizes)


def fail_in_write(context: Any, path: Path) -> tuple[str, list[str]]:
    """Rank 1 runs out of space."""
    mesh = make_mesh(1, 1, 2)
    contents = Toy.build(mesh, tag="new").contents()
    resolve = BoxSavePlanner.resolve_data

    def fail(self: BoxSavePlanner, item: Any) -> Any:
        raise OSError(28, "No space left on device")

    if mesh.rank == 1:
        BoxSavePlanner.resolve_data = fail
    try:
        message = attempt(lambda: save_checkpoint(path, contents, mesh=mesh))
        # The other rank may still be clearing away what it has begun.
        dist.barrier()
    finally:
        BoxSavePlanner.resolve_data = resolve
        mesh.close()
    return message, sorted(os.listdir(path.parent))


def fail_in_publish(context: Any, path: Path) -> tuple[str, list[str]]:
    """Rank 0 may not rename."""
    mesh = make_mesh(1, 1, 2)
    contents = Toy.build(mesh, tag="new").contents()
    publish = folder.publish

    def fail(staging: Path, target: Path) -> None:
        assert (staging / folder.META_FILE).exists()
        raise PermissionError("renaming is not allowed")

    folder.publish = fail
    try:
        message = attempt(lambda: save_checkpoint(path, contents, mesh=mesh))
        # The other rank may still be clearing away what it has begun.
        dist.barrier()
    finally:
        folder.publish = publish
        mesh.close()
    return message, sorted(os.listdir(path.parent))


def loads_as(context: Any, path: Path, tag: str) -> bool:
    mesh = make_mesh(1, 1, 2)
    toy, expected = Toy.build(mesh), Toy.build(mesh, tag=tag)
    toy.clear()
    checkpoint = open_checkpoint(path, mesh=mesh)
    load_tensors(checkpoint, toy.weight_list() + toy.state_list(), mesh=mesh)
    mesh.close()
    return same(toy.tensors(), expected.tensors())


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (fail_in_write, "OSError: [Errno 28] No space left on device [rank 1]"),
        (fail_in_publish, "PermissionError: renaming is not allowed [rank 0]"),
    ],
)
def test_a_failed_save_is_told_to_all_and_leaves_the_old_checkpoint(
    tmp_path: Path, fail: Any, said: str
) -> None:
    path = tmp_path / "last.ckpt"
    run_ranks(save_toy, 2, (1, 1, 2), path, "old")
    expected = (f"saving path='{path}' failed: {said}", ["last.ckpt"])
    assert run_ranks(fail, 2, path) == [expected, expected]
    assert run_ranks(loads_as, 2, path, "old") == [True, True]


def die_before_publishing(context: Any, path: Path) -> None:
    dist.init_process_group("gloo")
    mesh = make_mesh(1, 1, 1)
    folder.publish = lambda staging, target: os._exit(9)
    save_checkpoint(path, Toy.build(mesh, tag="new").contents(), mesh=mesh)


def test_a_crash_before_publishing_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    run_ranks(save_toy, 2, (1, 1, 2), path, "old")
    run_ranks(die_before_publishing, 1, path, isolated=True, expect_death=[0])
    assert folder.staging_of(path).is_dir()
    assert run_ranks(loads_as, 2, path, "old") == [True, True]
    run_ranks(save_toy, 2, (1, 1, 2), path, "newer")
    assert run_ranks(loads_as, 2, path, "newer") == [True, True]
    assert os.listdir(tmp_path) == ["last.ckpt"]


def refuse(context: Any, path: Path, kind: str) -> str:
    """Contents that do not make up a checkpoint; nothing may be written."""
    mesh = make_mesh(1, 1, 2)
    rank = mesh.rank
    half = ((Box((2 * rank,), (2,)), torch.ones(2)),)
    place = ("model", "w")
    meta: dict[str, Any] = {}
    objects: dict[Any, Any] = {}
    if kind == "gap":
        tensor = LocalTensor(place, (4,), torch.float32, half, writer=rank == 0)
    elif kind == "overlap":
        tensor = LocalTensor.whole(place, torch.ones(4))
    elif kind == "shape":
        tensor = LocalTensor(place, (4 + rank,), torch.float32, half)
    elif kind == "alias":
        tensor = LocalTensor(place, (4,), torch.float32, half, aliases=(("model", "w"),))
    else:
        tensor = LocalTensor(place, (4,), torch.float32, half)
    if kind == "meta":
        meta = {"model": 1}
    elif kind == "lambda":
        meta = {"hook": lambda: 1}
    elif kind == "object":
        objects = {("optimizer", "param_groups", 0, "path"): Path("/a")}
    contents = Contents(tensors=[tensor], meta=meta, objects=objects)
    message = attempt(lambda: save_checkpoint(path, contents, mesh=mesh))
    mesh.close()
    return message


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gap", "model.w: the ranks hold 2 of the 4 elements"),
        ("overlap", "model.w: two ranks hold the same elements"),
        ("shape", "model.w: two ranks disagree"),
        ("alias", "model.w: saved as a tensor and as another name of model.w"),
        ("meta", "'model' is given both as meta and as tensors or objects"),
        ("lambda", "meta entry 'hook' of type function cannot be saved"),
        ("object", "optimizer.param_groups.0.path holds pathlib.PosixPath"),
    ],
)
def test_contents_that_make_no_checkpoint_are_refused(tmp_path: Path, kind: str, said: str) -> None:
    one, other = run_ranks(refuse, 2, tmp_path / "checkpoint", kind)
    assert one == other
    assert said in one
    assert list(tmp_path.iterdir()) == []


def test_a_refused_save_does_not_look_like_a_hang(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="Install s3fs to access S3"):
        run_ranks(save_toy, 2, (1, 1, 2), "s3://bucket/checkpoint", timeout_s=20)
