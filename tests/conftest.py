"""Hooks for all tests: warm the forkserver before the first test, end the worlds after the last."""

from __future__ import annotations

import sys

import pytest

_WORLD = "tests.harness.world"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the forkserver outside of any test's time limit, if a collected test uses ranks."""
    if session.items and _WORLD in sys.modules and not session.config.option.collectonly:
        sys.modules[_WORLD].warm_up()


def pytest_unconfigure() -> None:
    """End all ranks: none may outlive pytest."""
    if _WORLD in sys.modules:
        sys.modules[_WORLD].close_worlds()
