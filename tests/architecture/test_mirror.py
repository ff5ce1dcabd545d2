"""Every source module has a test file of the same name: ``comm/p2p.py``, ``comm/test_p2p.py``."""

from __future__ import annotations

import pytest

from tests.architecture import rules

# Modules without a test file of their own, and why.
EXCEPTIONS = {
    "cuda_ops/bench/cases.py": "what the tests of cuda_ops step and compare",
    "mesh/axis.py": "an enum; its members are used by every test of the mesh",
    "models/bloom.py": "data; read through models/registry.py",
    "models/falcon.py": "data; read through models/registry.py",
    "models/gemma.py": "data; read through models/registry.py",
    "models/gpt2.py": "data; read through models/registry.py",
    "models/gpt_neox.py": "data; read through models/registry.py",
    "models/llama.py": "data; read through models/registry.py",
    "models/mistral.py": "data; read through models/registry.py",
    "models/mixtral.py": "data; read through models/registry.py",
    "models/opt.py": "data; read through models/registry.py",
    "models/phi3.py": "data; read through models/registry.py",
    "models/qwen2.py": "data; read through models/registry.py",
    "models/qwen3.py": "data; read through models/registry.py",
}
PACKAGE = rules.ROOT / "goose_strategy"
MODULES = [
    path.relative_to(rules.ROOT if package == "cuda_ops" else PACKAGE).as_posix()
    for package in rules.SOURCES
    for path in rules.python_files(package)
    if path.name not in ("__init__.py", "__main__.py")
]


@pytest.mark.parametrize("module", sorted(set(MODULES) - EXCEPTIONS.keys()))
def test_a_module_has_its_test_file(module: str) -> None:
    folder, _, name = module.rpartition("/")
    expected = rules.ROOT / "tests" / folder / f"test_{name}"
    assert expected.exists(), f"{rules.name_of(expected)} is missing"
    assert "def test_" in expected.read_text(encoding="utf-8"), f"{expected.name} tests nothing"


def test_exceptions_are_still_needed() -> None:
    assert EXCEPTIONS.keys() <= set(MODULES)
