"""Names that are imported when they are first used (PEP 562).

``import goose_strategy`` must register a name and cost next to nothing; the strategies behind the
public names import transformers, which takes seconds.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a module's ``__getattr__`` and ``__dir__`` for lazily imported names.

    Args:
        package: ``__name__`` of the module that offers the names.
        exports: Public name to ``"module:attribute"``.

    Returns:
        The two functions. ``__getattr__`` raises ``AttributeError`` for unknown names.
    """

    def get(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = exports[name].split(":")
        value = getattr(importlib.import_module(module), attribute)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *exports})

    return get, names
