"""Names are imported when they are used, once, and unknown ones say so as always."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

import goose_strategy
from goose_strategy.lazy import lazy_exports


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = ModuleType("a_package")
    get, names = lazy_exports(
        "a_package", {"Decimal": "decimal:Decimal", "gone": "decimal:no_such_thing"}
    )
    vars(module).update(__getattr__=get, __dir__=names, there=1)
    monkeypatch.setitem(sys.modules, "a_package", module)
    return module


def test_a_name_is_imported_when_it_is_used(package: Any) -> None:
    from decimal import Decimal

    assert "Decimal" not in vars(package)
    assert package.Decimal is Decimal
    assert vars(package)["Decimal"] is Decimal, "the second use costs nothing"


def test_names_are_listed_before_they_are_imported(package: Any) -> None:
    assert {"Decimal", "gone", "there"} <= set(dir(package))
    assert dir(package) == sorted(dir(package))


def test_unknown_names_raise_as_always(package: Any) -> None:
    with pytest.raises(AttributeError, match="module 'a_package' has no attribute 'nothing'"):
        _ = package.nothing
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = package.gone
    with pytest.raises(ImportError):
        exec("from goose_strategy import nothing", {})


def test_the_package_exports_what_its_type_checkers_see() -> None:
    from goose_strategy.strategies.fabric import Goose3DStrategy

    assert goose_strategy.Goose3DFabricStrategy is Goose3DStrategy
