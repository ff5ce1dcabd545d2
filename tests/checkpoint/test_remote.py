"""Folders behind a URL: what fsspec's file systems have in common."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from goose_strategy.checkpoint.folder import META_FILE
from goose_strategy.checkpoint.remote import LocalCopy, RemoteFolder, is_remote, without_scheme
from goose_strategy.errors import CheckpointError


@pytest.fixture(params=["memory", "dir"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file system without folders of its own, and one with a root of its own."""
    if request.param == "memory":
        return f"memory://{tmp_path.name}/run/last.ckpt"
    return f"dir://run/last.ckpt::file://{tmp_path}/bucket"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in (META_FILE, ".metadata", "__0_0.distcp"):
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("/a/b", False), ("a", False), ("file:///a", False), ("local:///a", False),
        ("s3://a/b", True), ("memory://a", True), ("simplecache::s3://a/b", True),
    ],
)  # fmt: skip
def test_a_remote_path_is_a_url_of_another_file_system(path: str, remote: bool) -> None:
    assert is_remote(path) is remote
    assert without_scheme(path) == path.removeprefix("file://").removeprefix("local://")


def test_files_go_up_and_come_down(url: str, source: Path, tmp_path: Path) -> None:
    folder = RemoteFolder(url)
    assert folder.names() == []
    assert not folder.is_complete()
    folder.upload(source, [".metadata", "__0_0.distcp"])
    assert not folder.is_complete()
    folder.upload(source, [META_FILE])
    assert RemoteFolder(url + "" if "::" in url else url + "/").is_complete()
    assert folder.names() == sorted([META_FILE, ".metadata", "__0_0.distcp"])
    down = tmp_path / "down"
    down.mkdir()
    folder.download(down, folder.names())
    assert {file.name: file.read_text() for file in down.iterdir()} == {
        n: n for n in folder.names()
    }


def test_a_folder_moves_with_the_list_last(
    url: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RemoteFolder(url)
    folder.upload(source, [META_FILE, ".metadata", "__0_0.distcp"])
    other = folder.beside(".other")
    copies: list[str] = []
    copy = folder._fs.cp_file
    monkeypatch.setattr(
        folder._fs, "cp_file", lambda a, b: (copies.append(Path(a).name), copy(a, b))
    )
    folder.move_to(other)
    assert copies[-1] == META_FILE
    assert folder.names() == []
    assert other.is_complete() and len(other.names()) == 3
    other.remove()
    other.remove()
    assert other.names() == []


def test_what_is_no_checkpoint_is_never_replaced(url: str, source: Path) -> None:
    folder = RemoteFolder(url)
    folder.check_free()
    folder.upload(source, [".metadata", "__0_0.distcp"])
    folder.check_free()  # what an interrupted upload left
    (source / "thesis.tex").write_text("x")
    folder.upload(source, ["thesis.tex"])
    with pytest.raises(CheckpointError, match=r"has other things in it \(thesis\.tex"):
        folder.check_free()
    file = RemoteFolder(url.replace("last.ckpt", "last.ckpt/thesis.tex"))
    assert file.is_file()
    with pytest.raises(CheckpointError, match="a file of that name"):
        file.check_free()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/a", "Install s3fs to access S3"),
        ("nope://a", "Protocol not known: nope"),
        ("memory://", "has no name of its own"),
    ],
)
def test_what_cannot_be_reached_is_said_at_once(url: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        RemoteFolder(url)


def test_a_local_copy_goes_with_its_object() -> None:
    copy = LocalCopy()
    path = copy.path
    (path / "file").write_text("x")
    assert path.is_dir()
    del copy
    gc.collect()
    assert not path.exists()
    other = LocalCopy()
    other.remove()
    assert not other.path.exists()
