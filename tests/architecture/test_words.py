"""No file names a path of one machine, a note without an issue, or a debugger."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import rules

_SUFFIXES = {".cfg", ".cu", ".cuh", ".cpp", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
_FOLDERS = (*rules.SOURCES, "recipes", "tests")
CANDIDATES = [
    *rules.ROOT.glob("*"),
    *(path for folder in _FOLDERS for path in (rules.ROOT / folder).rglob("*")),
]
FILES = sorted(
    path
    for path in CANDIDATES
    if path.is_file() and (path.suffix in _SUFFIXES or path.name == "Makefile")
)


@pytest.mark.parametrize("path", FILES, ids=rules.name_of)
def test_no_forbidden_words(path: Path) -> None:
    if path == Path(rules.__file__):
        pytest.skip("the rule itself")
    assert rules.word_violations(path.read_text(encoding="utf-8")) == []
