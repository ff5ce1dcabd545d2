"""Private APIs of other packages are used in four files, which have tests of their own.

ruff's SLF rules watch private attributes; imports of private names are watched here.
"""

from __future__ import annotations

import pytest

from tests.architecture import rules

ALLOWED = {
    "goose_strategy/compat/peft.py",
    "goose_strategy/compat/torch.py",
    "goose_strategy/compat/transformers.py",
    "goose_strategy/compat/weights.py",
    "goose_strategy/strategies/compat.py",
}
PATHS = {rules.name_of(path): path for path in rules.python_files(*rules.SOURCES)}


@pytest.mark.parametrize("name", sorted(PATHS.keys() - ALLOWED))
def test_private_names_are_not_imported(name: str) -> None:
    assert rules.private_import_violations(PATHS[name].read_text(encoding="utf-8")) == []
