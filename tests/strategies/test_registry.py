"""``strategy="goose3d"`` by name, by YAML, by variable; the wrong door; the price of an import."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import lightning.pytorch as pl
import pytest
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry

import goose_strategy
from goose_strategy import Goose3DFabricStrategy, Goose3DStrategy
from goose_strategy.errors import ConfigError
from goose_strategy.strategies.registry import NAME, fabric_factory, register, trainer_factory
from tests.harness.worker import ROOT


def test_the_import_registers_the_name_at_both_doors() -> None:
    assert NAME == "goose3d"
    assert NAME in STRATEGY_REGISTRY.available_strategies()
    assert NAME in StrategyRegistry.available_strategies()


def test_registering_again_changes_nothing() -> None:
    before = STRATEGY_REGISTRY[NAME], StrategyRegistry[NAME]
    register()
    importlib.reload(goose_strategy)
    assert before[0] is STRATEGY_REGISTRY[NAME]
    assert before[1] is StrategyRegistry[NAME]


def test_the_bare_name_is_a_drop_in_for_ddp() -> None:
    fabric = Fabric(accelerator="cpu", devices=3, strategy="goose3d")
    trainer = pl.Trainer(accelerator="cpu", devices=3, strategy="goose3d", logger=False)
    for strategy, kind in (
        (fabric.strategy, Goose3DFabricStrategy),
        (trainer.strategy, Goose3DStrategy),
    ):
        assert type(strategy) is kind
        assert (strategy.runtime.config.tp, strategy.runtime.config.pp) == (1, 1)


# -- variables ----------------------------------------------------------------------------------


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith("GOOSE3D_"):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("factory", [fabric_factory, trainer_factory])
def test_variables_give_the_bare_name_its_sizes(
    variables: pytest.MonkeyPatch, factory: Any
) -> None:
    settings = {"TP": "2", "PP": "4", "SCHEDULE": "GPipe", "NUM_MICROBATCHES": "16"}
    for name, value in settings.items():
        variables.setenv(f"GOOSE3D_{name}", value)
    config = factory().runtime.config
    assert (config.tp, config.pp) == (2, 4)
    assert (config.pipeline.schedule, config.pipeline.num_microbatches) == ("GPipe", 16)
    assert factory(tp=1).runtime.config.tp == 1, "an argument comes before a variable"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("GOOSE3D_TP", "two", "GOOSE3D_TP='two' must be a whole number"),
        ("GOOSE3D_PP", "0", "pp=0 must be at least 1"),
        ("GOOSE3D_SCHEDULE", "1f1b", "GOOSE3D_SCHEDULE='1f1b': .*is not known; .*'1F1B'"),
        ("GOOSE3D_NUM_MICROBATCHES", "0", "num_microbatches=0"),
    ],
)
def test_wrong_variables_are_named(
    variables: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    variables.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        Fabric(accelerator="cpu", devices=1, strategy="goose3d")


# -- the wrong door -----------------------------------------------------------------------------


def test_the_trainers_class_is_refused_by_fabric_with_the_right_import() -> None:
    with pytest.raises(ValueError, match="from goose_strategy import Goose3DFabricStrategy"):
        Fabric(accelerator="cpu", devices=2, strategy=Goose3DStrategy())


def test_fabrics_class_is_refused_by_the_trainer_with_the_right_import() -> None:
    with pytest.raises(ValueError, match="from goose_strategy import Goose3DStrategy"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=Goose3DFabricStrategy())


# -- the command line ---------------------------------------------------------------------------

RECIPE = """
trainer:
  accelerator: cpu
  devices: 8
  logger: false
  strategy:
    class_path: goose_strategy.Goose3DStrategy
    init_args:
      tp: 2
      pp: 2
      timeout: 0:05:00
      pipeline:
        schedule: GPipe
        num_microbatches: 8
      zero:
        bucket_numel: 4096
"""


Parse: TypeAlias = Callable[..., Any]


@pytest.fixture
def parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parse:
    """Return what parses a command line and builds the Trainer, without running anything."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    # LightningCLI calls methods of jsonargparse that have been renamed since.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    def run(*arguments: str) -> Any:
        monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(recipe), *arguments])
        cli = LightningCLI(
            BoringModel, run=False, save_config_callback=None, seed_everything_default=False
        )
        return cli.trainer.strategy

    return run


def test_yaml_names_the_class_and_its_settings(parse: Parse) -> None:
    strategy = parse()
    assert type(strategy) is Goose3DStrategy
    config = strategy.runtime.config
    assert (config.tp, config.pp, config.zero.bucket_numel) == (2, 2, 4096)
    assert (config.pipeline.schedule, config.pipeline.num_microbatches) == ("GPipe", 8)


def test_the_command_line_changes_nested_settings(parse: Parse) -> None:
    config = parse(
        "--trainer.strategy.init_args.pipeline.num_microbatches=16",
        "--trainer.strategy.pp=4",
        "--trainer.strategy.pipeline.schedule=1F1B",
        "--trainer.strategy.tensor.gather_logits=true",
    ).runtime.config
    assert (config.tp, config.pp) == (2, 4)
    assert (config.pipeline.schedule, config.pipeline.num_microbatches) == ("1F1B", 16)
    assert config.tensor.gather_logits is True


def test_the_command_line_switches_to_the_bare_name(parse: Parse) -> None:
    strategy = parse("--trainer.strategy=goose3d")
    assert (strategy.runtime.config.tp, strategy.runtime.config.pp) == (1, 1)


@pytest.mark.parametrize("argument", ["tpp=2", "tp=two"])
def test_typing_errors_are_refused(
    parse: Parse, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(f"--trainer.strategy.{argument}")
    assert argument.split("=")[0].split(".")[-1] in capsys.readouterr().err


def test_an_unknown_schedule_is_refused(parse: Parse) -> None:
    with pytest.raises(ValueError, match="schedule='ZB-X' is not known; choose one of 'GPipe'"):
        parse("--trainer.strategy.pipeline.schedule=ZB-X")


# -- the price ----------------------------------------------------------------------------------

# Lightning is imported once; each child, forked after that, imports the package and tells the time.
_IMPORT = """
import os, sys, time
import lightning
before = set(sys.modules)
for _ in range(5):
    child = os.fork()
    if child == 0:
        begin = time.process_time()
        import goose_strategy
        import goose_strategy  # twice
        print(time.process_time() - begin, flush=True)
        added = set(sys.modules) - before
        assert not added & {"transformers", "torch.distributed.checkpoint"}, sorted(added)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_the_import_is_cheap() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _IMPORT],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken = sorted(map(float, done.stdout.split()))
    print(f"import goose_strategy after lightning: {taken} s of processor time")
    # Processor time, because other processes share the machine; the wall's is the same alone.
    assert len(taken) == 5
    assert taken[2] < 0.1
