from __future__ import annotations

from pathlib import Path

import pytest

from cuda_ops import sources
from cuda_ops.sources import CSRC, find_library, folders, library_name, source_hash


def test_the_hash_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = source_hash()
    for path in CSRC.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(sources, "CSRC", tmp_path)
    source_hash.cache_clear()
    try:
        assert source_hash() == before
        source_hash.cache_clear()
        with (tmp_path / "element.h").open("a") as file:
            file.write("// changed\n")
        assert source_hash() != before
    finally:
        source_hash.cache_clear()


def test_the_package_comes_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(sources, "folders", lambda: (first, second))
    assert find_library("cpu") is None
    for folder in (second, first):
        folder.mkdir()
        (folder / library_name("cpu")).touch()
        assert find_library("cpu") == folder / library_name("cpu")


def test_the_cache_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folders()[1] == tmp_path / "goose3d" / "cuda_ops"
