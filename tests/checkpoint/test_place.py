"""Checkpoints behind a URL: any layout, one appearance, and the previous one until then."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from goose_strategy.checkpoint.folder import META_FILE
from goose_strategy.checkpoint.load import load_tensors, open_alone, open_checkpoint
from goose_strategy.checkpoint.place import LocalDraft, RemoteDraft, draft_of, resolved
from goose_strategy.checkpoint.remote import RemoteFolder
from goose_strategy.checkpoint.save import save_checkpoint
from goose_strategy.errors import CheckpointError
from tests.checkpoint.test_load import load_all
from tests.checkpoint.toy import SHAPES, Toy, attempt, make_mesh, same, save_toy, whole
from tests.harness.world import run_ranks

Plant = Callable[[], AbstractContextManager[Any]]


def url_in(folder: Path, name: str = "last.ckpt") -> str:
    return f"dir://{name}::file://{folder}"


def saved(sizes: tuple[int, int, int], path: str, tag: str = "") -> None:
    run_ranks(save_toy, torch.Size(sizes).numel(), sizes, path, tag)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 2)], ids=str)
def test_any_layout_loads_from_a_url(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    saved((2, 2, 2), url_in(tmp_path))
    for verdicts in run_ranks(load_all, torch.Size(sizes).numel(), sizes, [url_in(tmp_path)]):
        assert verdicts == [True]
    assert [folder.name for folder in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_file_url_is_a_path_of_the_machine(tmp_path: Path) -> None:
    saved((1, 2, 1), f"file://{tmp_path}/last.ckpt")
    assert (tmp_path / "last.ckpt" / META_FILE).is_file()
    for verdicts in run_ranks(load_all, 2, (2, 1, 1), [f"local://{tmp_path}/last.ckpt"]):
        assert verdicts == [True]


def _in_memory(_context: Any) -> tuple[bool, list[str], list[str]]:
    with tempfile.TemporaryDirectory() as folder, patch.object(tempfile, "tempdir", folder):
        mesh = make_mesh(1, 1, 1)
        url = "memory://test_place/last.ckpt"
        for tag in ("old", ""):
            save_checkpoint(url, Toy.build(mesh, tag=tag).contents(), mesh=mesh)
        toy, expected = Toy.build(mesh, tag="other"), Toy.build(mesh)
        checkpoint = open_checkpoint(url, mesh=mesh)
        load_tensors(checkpoint, toy.weight_list() + toy.state_list(), mesh=mesh)
        during = [path.name for path in Path(folder).iterdir()]
        name = checkpoint.name
        del checkpoint
        mesh.close()
        assert name == url
        left = [path.name for path in Path(folder).iterdir()]
        return same(toy.tensors(), expected.tensors()), during, left


def test_a_checkpoint_lives_in_memory_and_leaves_nothing_on_the_disk() -> None:
    ((loaded, during, left),) = run_ranks(_in_memory, 1)
    assert loaded
    assert len(during) == 1
    assert left == []


# -- interruptions -------------------------------------------------------------------------------


def _save_with(_context: Any, url: str, tag: str, plant: Plant) -> str:
    mesh = make_mesh(1, 1, 2)
    contents = Toy.build(mesh, tag=tag).contents()
    with plant() if mesh.rank == 1 or plant is not upload_fails else nullcontext():
        message = attempt(lambda: save_checkpoint(url, contents, mesh=mesh))
    mesh.close()
    return message


def _tag_of(_context: Any, url: str, tags: list[str]) -> list[bool]:
    mesh = make_mesh(1, 1, 2)
    toy = Toy.build(mesh, tag="none of them")
    checkpoint = open_checkpoint(url, mesh=mesh)
    load_tensors(checkpoint, toy.weight_list() + toy.state_list(), mesh=mesh)
    found = [same(toy.tensors(), Toy.build(mesh, tag=tag).tensors()) for tag in tags]
    mesh.close()
    return found


def fail(*_args: Any) -> None:
    raise OSError("connection lost")


def upload_fails() -> AbstractContextManager[Any]:
    """The second rank cannot upload its shards."""
    return patch.object(RemoteFolder, "upload", fail)


def list_fails() -> AbstractContextManager[Any]:
    """Everything is uploaded but meta.pt."""
    upload = RemoteFolder.upload

    def without_meta(self: RemoteFolder, folder: Path, names: Any) -> None:
        upload(self, folder, [name for name in names if name != META_FILE])
        if META_FILE in names:
            fail()

    return patch.object(RemoteFolder, "upload", without_meta)


def second_move_fails() -> AbstractContextManager[Any]:
    """The previous checkpoint was moved aside, and then the connection is lost."""
    move = RemoteFolder.move_to

    def only_aside(self: RemoteFolder, other: RemoteFolder) -> None:
        (move if other._root.endswith(".replaced") else fail)(self, other)

    return patch.object(RemoteFolder, "move_to", only_aside)


@pytest.mark.parametrize("plant", [upload_fails, list_fails])
def test_a_failed_upload_leaves_the_previous_checkpoint(tmp_path: Path, plant: Plant) -> None:
    url = url_in(tmp_path)
    saved((1, 1, 2), url, "old")
    one, other = run_ranks(_save_with, 2, url, "new", plant)
    assert one == other
    assert "connection lost" in one
    assert run_ranks(_tag_of, 2, url, ["old", "new"]) == [[True, False]] * 2
    saved((1, 1, 2), url, "new")
    assert run_ranks(_tag_of, 2, url, ["old", "new"]) == [[False, True]] * 2
    assert [folder.name for folder in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("plant", [upload_fails, list_fails])
def test_a_failed_first_upload_leaves_nothing(tmp_path: Path, plant: Plant) -> None:
    url = url_in(tmp_path)
    run_ranks(_save_with, 2, url, "new", plant)
    assert RemoteFolder(url).names() == []
    saved((1, 1, 2), url, "new")
    assert run_ranks(_tag_of, 2, url, ["new"]) == [[True]] * 2


def test_an_interrupted_exchange_is_recovered_by_the_next_save(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    saved((1, 1, 2), url, "old")
    run_ranks(_save_with, 2, url, "new", second_move_fails)
    assert RemoteFolder(url).beside(".replaced").is_complete()
    run_ranks(_save_with, 2, url, "new", list_fails)
    assert run_ranks(_tag_of, 2, url, ["old"]) == [[True]] * 2


def _refused(_context: Any, url: str) -> str:
    mesh = make_mesh(1, 1, 2)
    message = attempt(lambda: open_checkpoint(url, mesh=mesh))
    mesh.close()
    return message


def test_damage_and_absence_are_refused_on_all_ranks(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    one, other = run_ranks(_refused, 2, url)
    assert one == other
    assert f"path={url!r} does not exist" in one
    saved((1, 1, 2), url)
    shard = next((tmp_path / "last.ckpt").glob("__0_*.distcp"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    one, other = run_ranks(_refused, 2, url)
    assert one == other
    assert "crc32" in one and repr(url) in one
    (tmp_path / "last.ckpt" / META_FILE).unlink()
    assert "has no meta.pt" in run_ranks(_refused, 2, url)[0]


def _single(_context: Any, url: str) -> list[bool]:
    mesh = make_mesh(1, 1, 2)
    checkpoint = open_checkpoint(url, mesh=mesh)
    toy = Toy.build(mesh, tag="other")
    load_tensors(checkpoint, toy.weight_list(), mesh=mesh, strict=False)
    expected = Toy.build(mesh)
    mesh.close()
    return [torch.equal(toy.weights[name], expected.weights[name]) for name in toy.weights]


def test_a_single_file_behind_a_url_is_read_too(tmp_path: Path) -> None:
    torch.save({"model": {name: whole(name) for name in SHAPES}}, tmp_path / "one.pt")
    for equal in run_ranks(_single, 2, url_in(tmp_path, "one.pt")):
        assert sum(equal) == len(equal) - 1  # the buffer is not in it


def test_one_process_alone_opens_a_url(tmp_path: Path) -> None:
    saved((1, 2, 2), url_in(tmp_path))
    checkpoint = open_alone(url_in(tmp_path))
    assert checkpoint.meta == {"step": 3}
    assert checkpoint.name == url_in(tmp_path)
    assert (checkpoint.path / META_FILE).is_file()
    with pytest.raises(CheckpointError, match="does not exist"):
        open_alone(url_in(tmp_path, "absent"))


def test_paths_are_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolved("a") == resolved(Path("a")) == str(tmp_path / "a")
    assert resolved(f"file://{tmp_path}/a") == str(tmp_path / "a")
    assert resolved("memory://a/b") == "memory://a/b"
    assert isinstance(draft_of("memory://a/b", is_first=True), RemoteDraft)
    assert isinstance(draft_of(str(tmp_path / "a"), is_first=True), LocalDraft)


def test_the_memory_of_one_process_is_no_place_for_several() -> None:
    assert resolved("memory://somewhere/last.ckpt") == "memory://somewhere/last.ckpt"
    with pytest.raises(CheckpointError, match=r"memory of one process, but 2 ranks share"):
        resolved("memory://somewhere/last.ckpt", ranks=2)
