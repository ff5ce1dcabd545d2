"""The name without an import: with the variable set, unset, and in broken surroundings.

Every program is a process of its own with an installed entry point, read from pyproject.toml.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from goose3d_autoload.hook import REGISTRIES, VARIABLE, Hook, autoload

from tests.harness.worker import ROOT

FABRIC = """
from lightning.fabric import Fabric
strategy = Fabric(accelerator="cpu", devices=1, strategy="goose3d").strategy
print(type(strategy).__module__)
"""
TRAINER = """
import lightning.pytorch as pl
trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="goose3d", logger=False)
print(type(trainer.strategy).__module__)
"""
KNOWN = "goose_strategy.strategies"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that holds the package's metadata, as an installation leaves it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = tmp_path / "site" / "goose_strategy-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: goose-strategy\nVersion: 0\n")
    lines = [f"{k} = {v}" for k, v in project["entry-points"]["torch.backends"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines, ""]))
    return info.parent


def run(
    program: str, *folders: Path, variable: str | None = "1", **environment: str
) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GOOSE3D_")}
    chosen = {} if variable is None else {VARIABLE: variable}
    path = os.pathsep.join(map(str, [*folders, ROOT, ROOT / "goose_strategy" / "autoload"]))
    return subprocess.run(
        [sys.executable, "-W", "ignore::FutureWarning", "-c", program],
        env={**kept, **chosen, **environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=folders[0],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("first", ["", "import torch", "import lightning"])
def test_the_name_is_known_without_an_import(installed: Path, first: str) -> None:
    done = run(f"{first}\n{FABRIC}\n{TRAINER}", installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{KNOWN}.fabric", f"{KNOWN}.pytorch"]
    assert VARIABLE not in done.stderr


@pytest.mark.parametrize("value", ["", "0", None])
def test_the_hook_is_off_by_default(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    before = list(sys.meta_path)
    autoload()
    assert sys.meta_path == before


def test_the_hook_is_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = len(sys.meta_path)
    autoload()
    autoload()
    assert len(sys.meta_path) == before + 1
    assert isinstance(sys.meta_path[0], Hook)


@pytest.mark.parametrize(
    ("variable", "environment"), [(None, {}), ("1", {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})]
)
def test_it_is_off_by_default_and_with_torchs_mechanism(
    installed: Path, variable: str | None, environment: dict[str, str]
) -> None:
    done = run(FABRIC, installed, variable=variable, **environment)
    assert done.returncode != 0
    assert "goose3d" in done.stderr.splitlines()[-1]
    assert "invalid strategy name" in done.stderr.lower()


def test_off_it_imports_nothing(installed: Path) -> None:
    program = """
import sys
before = set(sys.modules)
import torch
added = {name for name in sys.modules if name.split(".")[0] in ("goose_strategy", "lightning")}
assert not added, sorted(added)
assert "goose3d_autoload.hook" in sys.modules, "the entry point was not loaded at all"
assert not any(type(finder).__name__ == "Hook" for finder in sys.meta_path)
"""
    done = run(program, installed, variable=None)
    assert done.returncode == 0, done.stderr


def test_on_torch_alone_imports_nothing_and_modules_keep_no_trace(installed: Path) -> None:
    program = """
import sys
import torch
assert not {"goose_strategy", "lightning"} & set(sys.modules)
import lightning.fabric.strategies as module
assert type(module.__loader__).__module__ != "goose3d_autoload.hook", module.__loader__
assert module.__spec__.loader is module.__loader__
assert "goose_strategy" not in sys.modules
assert "goose3d" in module.STRATEGY_REGISTRY.available_strategies()
"""
    done = run(program, installed)
    assert done.returncode == 0, done.stderr


def test_the_package_may_be_imported_too(installed: Path) -> None:
    for program in ("import goose_strategy", "import torch, goose_strategy"):
        done = run(f"{program}\n{FABRIC}\n{TRAINER}", installed)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == [f"{KNOWN}.fabric", f"{KNOWN}.pytorch"]


def test_a_wrong_value_is_a_warning(installed: Path) -> None:
    done = run("import torch; print(torch.ones(1).item())", installed, variable="yes")
    assert (done.returncode, done.stdout.strip()) == (0, "1.0")
    assert f"{VARIABLE}='yes' must be 0 or 1" in done.stderr


def test_the_twins_are_refused_by_name(installed: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    done = run(TRAINER.replace("lightning.pytorch", "pytorch_lightning"), installed)
    assert done.returncode != 0
    assert "strategy='goose3d' was given to pytorch_lightning" in done.stderr
    assert "lightning.pytorch" in done.stderr.splitlines()[-1]


_NO_LIGHTNING = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "lightning_fabric", "pytorch_lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import torch
print(torch.ones(1).item())
try:
    import lightning.fabric.strategies
except ModuleNotFoundError as error:
    print(error.name)
"""


def test_without_lightning_torch_works(installed: Path) -> None:
    done = run(_NO_LIGHTNING, installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1.0", "lightning"]


def broken(tmp_path: Path) -> Path:
    """A folder with a package that cannot be imported, in front of the real one."""
    package = tmp_path / "broken" / "goose_strategy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('half installed')\n")
    return package.parent


def test_a_broken_package_breaks_its_own_name_only(installed: Path, tmp_path: Path) -> None:
    folders = broken(tmp_path), installed
    done = run("import torch, lightning; print(torch.ones(1).item())", *folders)
    assert (done.returncode, done.stdout.strip()) == (0, "1.0"), done.stderr
    done = run(FABRIC, *folders)
    assert done.returncode != 0
    assert "half installed" in done.stderr.splitlines()[-1]


def test_a_registry_that_has_moved_is_a_warning(installed: Path) -> None:
    program = """
import torch
from goose3d_autoload import hook
hook.REGISTRIES["lightning.fabric.strategies"] = "MOVED"
import lightning
print(torch.ones(1).item())
"""
    done = run(program, installed)
    assert (done.returncode, done.stdout.strip()) == (0, "1.0"), done.stderr
    assert "could not be registered in lightning.fabric.strategies: AttributeError" in done.stderr


def test_modules_of_others_are_not_touched() -> None:
    hook = Hook()
    assert hook.find_spec("json", None) is None
    assert hook.find_spec("lightning.fabric", None) is None
    assert set(REGISTRIES) == {
        "lightning.fabric.strategies",
        "lightning.pytorch.strategies",
        "lightning_fabric.strategies",
        "pytorch_lightning.strategies",
    }


def test_the_entry_point_is_cheap(installed: Path) -> None:
    program = """
import importlib.abc, importlib.util, sys, time, typing, warnings  # imported by torch, too
begin = time.process_time()
from goose3d_autoload import hook
hook.autoload()
print(time.process_time() - begin)
"""
    for variable in ("0", "1"):
        done = run(program, installed, variable=variable)
        taken = float(done.stdout)
        print(f"entry point with {VARIABLE}={variable}: {taken * 1e3:.2f} ms")
        assert taken < 0.02
