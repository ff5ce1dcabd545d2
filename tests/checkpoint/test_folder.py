from __future__ import annotations

from pathlib import Path

import pytest

from goose_strategy.checkpoint import folder
from goose_strategy.errors import CheckpointError


def finished(path: Path, text: str = "old") -> Path:
    path.mkdir(parents=True)
    (path / folder.META_FILE).write_text(text)
    return path


def content(path: Path) -> str:
    return (path / folder.META_FILE).read_text()


def test_publish_replaces_a_checkpoint_a_file_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("single")
    finished(tmp_path / "folder")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name in ("file", "folder", "link", "nothing"):
        path = tmp_path / name
        staging = finished(folder.staging_of(path), "new")
        folder.publish(staging, path)
        assert content(path) == "new"
    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder", "link", "nothing"}


def test_prepare_clears_what_an_interrupted_save_left(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.ckpt"
    stale = folder.staging_of(path)
    stale.mkdir(parents=True)
    (stale / "__0_0.distcp").touch()
    assert list(folder.prepare(path).iterdir()) == []


def test_prepare_takes_an_empty_folder_but_none_with_other_things(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    folder.prepare(empty)
    (empty / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="a folder with other things in it"):
        folder.prepare(empty)
    assert (empty / "thesis.tex").exists()


def test_a_crash_between_the_two_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = finished(tmp_path / "last.ckpt")
    staging = finished(folder.staging_of(path), "new")
    rename = Path.rename

    def crash(self: Path, target: Path) -> Path:
        if self == staging:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        folder.publish(staging, path)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"moved the previous checkpoint to '.*\.replaced'"):
        folder.check_complete(path)
    folder.prepare(path)
    assert content(path) == "old"


def test_a_failed_rename_puts_the_previous_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = finished(tmp_path / "last.ckpt")
    staging = finished(folder.staging_of(path), "new")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self == staging:
            raise PermissionError
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(PermissionError):
        folder.publish(staging, path)
    assert content(path) == "old"


@pytest.mark.parametrize("path", ["s3://bucket/a", "/"])
def test_paths_that_cannot_be_renamed_are_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match=f"path={path!r}"):
        folder.local_path(path)
