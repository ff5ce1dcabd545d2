"""Files, functions and signatures stay small, and ``__init__.py`` holds no code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture import rules

SOURCES = rules.python_files(*rules.SOURCES, "recipes")
TESTS = rules.python_files("tests")


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=rules.name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    assert rules.size_violations(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", SOURCES, ids=rules.name_of)
def test_signatures_are_short_and_no_state_is_global(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert rules.parameter_violations(text) + rules.global_violations(text) == []


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if path.name == "__init__.py"], ids=rules.name_of
)
def test_packages_only_re_export(path: Path) -> None:
    assert rules.init_violations(path.read_text(encoding="utf-8")) == []
