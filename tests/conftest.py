"""Hooks for all tests: ranks are warmed before and ended after, and tests leave nothing behind."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

_WORLD = "tests.harness.world"


def pytest_configure() -> None:
    """Compute references as the ranks compute: with one thread, whose sums have one order."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """Put the environment back after each test: ``seed_everything`` alone leaves two variables."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the forkserver outside of any test's time limit, if a collected test uses ranks."""
    if session.items and _WORLD in sys.modules and not session.config.option.collectonly:
        sys.modules[_WORLD].warm_up()


def pytest_unconfigure() -> None:
    """End all ranks: none may outlive pytest."""
    if _WORLD in sys.modules:
        sys.modules[_WORLD].close_worlds()
