"""Every YAML below recipes/ parses, and every class it names exists."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.rules import ROOT, name_of

RECIPES = sorted((ROOT / "recipes").glob("**/*.y*ml"))


def class_paths(node: Any) -> Iterator[str]:
    """Yield every ``class_path`` of a parsed recipe."""
    if isinstance(node, dict):
        if isinstance(node.get("class_path"), str):
            yield node["class_path"]
        for value in node.values():
            yield from class_paths(value)
    elif isinstance(node, list):
        for value in node:
            yield from class_paths(value)


def resolve(path: str) -> object:
    """Import what a dotted path names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", RECIPES, ids=name_of)
def test_a_recipe_parses_and_names_existing_classes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The command line imports a recipe's own modules from the recipe's folder.
    monkeypatch.syspath_prepend(path.parent)
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(recipe, dict)
    assert recipe
    for dotted in class_paths(recipe):
        assert callable(resolve(dotted)), dotted


def test_a_wrong_class_is_found() -> None:
    recipe = {"trainer": {"strategy": [{"class_path": "goose_strategy.NoSuchThing"}]}}
    (dotted,) = class_paths(recipe)
    with pytest.raises(AttributeError):
        resolve(dotted)
