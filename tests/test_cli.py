"""The command line knows the strategy, takes nested overrides, and says what is wrong in a line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from goose_strategy import Goose3DProgressBar, Goose3DStrategy, TimelineRecorder, cli
from goose_strategy.bench import engine, optimizer, step
from goose_strategy.errors import BatchError, PlanError

RECIPE = """\
seed_everything: 1
model: {class_path: cli_toy.Toy}
data: {class_path: cli_toy.Data}
trainer:
  accelerator: cpu
  devices: 8
  logger: false
  enable_checkpointing: false
  strategy:
    class_path: goose_strategy.Goose3DStrategy
    init_args:
      tp: 2
      pp: 2
      pipeline: {schedule: 1F1B, num_microbatches: 4}
"""
TOY = """\
import lightning as L
import torch

class Toy(L.LightningModule):
    def __init__(self, bug: bool = False):
        super().__init__()
        if bug:
            raise ValueError("a bug of the user's own")
        self.layer = torch.nn.Linear(2, 1)

class Data(L.LightningDataModule):
    pass
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run ``goose3d fit`` on the recipe up to the fit: (exit code, trainer or None, stderr)."""
    (tmp_path / "cli_toy.py").write_text(TOY)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    # LightningCLI calls methods of jsonargparse that have been renamed since.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "path", list(sys.path))
    seen: list[Trainer] = []
    monkeypatch.setattr(Trainer, "fit", lambda trainer, *_, **__: seen.append(trainer))
    monkeypatch.setattr(cli.Goose3DCLI, "after_fit", lambda _: None)

    def go(*overrides: str) -> tuple[int, Any, str]:
        config = f"--config={tmp_path / 'recipe.yaml'}"
        monkeypatch.setattr(sys, "argv", ["goose3d", "fit", config, *overrides])
        code = cli.main()
        return code, seen[0] if seen else None, capsys.readouterr().err

    yield go
    sys.modules.pop("cli_toy", None)


def config_of(trainer: Any) -> Any:
    return trainer.strategy.runtime.config


def test_a_recipe_beside_its_classes_is_run(run: Any) -> None:
    code, trainer, _ = run()
    assert code == 0
    assert isinstance(trainer.strategy, Goose3DStrategy)
    config = config_of(trainer)
    assert (config.tp, config.pp, config.pipeline.num_microbatches) == (2, 2, 4)


def test_nested_settings_are_overridden(run: Any) -> None:
    _, trainer, _ = run(
        "--trainer.strategy.pipeline.num_microbatches=16",
        "--trainer.strategy.init_args.tp=1",
        "--trainer.strategy.pp=4",
        "--trainer.strategy.pipeline.schedule=GPipe",
    )
    config = config_of(trainer)
    assert (config.tp, config.pp) == (1, 4)
    assert (config.pipeline.schedule, config.pipeline.num_microbatches) == ("GPipe", 16)


def test_a_recorder_of_timelines_can_be_named_in_a_recipe(run: Any, tmp_path: Path) -> None:
    code, trainer, _ = run(
        "--trainer.callbacks=TimelineRecorder",
        f"--trainer.callbacks.dir={tmp_path / 'lines'}",
        "--trainer.callbacks.steps=3",
    )
    assert code == 0
    (recorder,) = [call for call in trainer.callbacks if isinstance(call, TimelineRecorder)]
    assert (recorder.dir, recorder.steps, recorder.skip) == (tmp_path / "lines", 3, 1)


def test_wrong_settings_of_a_recorder_are_one_line(run: Any, tmp_path: Path) -> None:
    code, _, told = run(
        "--trainer.callbacks=goose_strategy.TimelineRecorder",
        f"--trainer.callbacks.dir={tmp_path / 'lines'}",
        "--trainer.callbacks.steps=0",
    )
    assert code == 2
    assert "steps=0 must be at least 1" in told


def test_the_bare_name_is_a_drop_in_for_ddp(run: Any) -> None:
    _, trainer, _ = run("--trainer.strategy=goose3d")
    assert (config_of(trainer).tp, config_of(trainer).pp) == (1, 1)


def test_the_bare_name_reads_the_environment(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOSE3D_TP", "4")
    _, trainer, _ = run("--trainer.strategy=goose3d")
    assert config_of(trainer).tp == 4


def test_bare_class_names_are_known(run: Any) -> None:
    _, trainer, _ = run(
        "--trainer.strategy=Goose3DStrategy",
        "--trainer.strategy.tp=2",
        "--trainer.callbacks=Goose3DProgressBar",
        "--trainer.callbacks.refresh_rate=7",
    )
    assert config_of(trainer).tp == 2
    (bar,) = [call for call in trainer.callbacks if isinstance(call, Goose3DProgressBar)]
    assert bar.refresh_rate == 7


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--trainer.strategy.tp=3", "tp=3 x pp=2"),
        ("--trainer.strategy.pp=0", "pp=0"),
        (
            "--trainer.strategy.pipeline.schedule=2F2B",
            "schedule='2F2B' is not known; choose one of 'GPipe', '1F1B', 'Interleaved1F1B'",
        ),
        ("--trainer.strategy.pipeline.num_microbatches=0", "num_microbatches=0"),
        ("--trainer.strategy.tq=2", "trainer.strategy: .*'tq' is not accepted"),
        ("--trainer.strategy.tp=two", "tp: Expected a <class 'int'>. Got value: two"),
        ("--trainer.strategy=gosling", "strategy='gosling'"),
        ("--trainer.strategy=no.such.Strategy", "strategy='no.such.strategy'"),
        (
            "--trainer.strategy=goose3d --trainer.strategy.tp=2",
            "goose3d is a bare name.*class_path",
        ),
        ("--trainer.max_steps=many", "trainer.max_steps: Expected a <class 'int'>"),
        ("--trainer.no_such_option=1", "--trainer.no_such_option"),
        ("--model.class_path=cli_toy.Nothing", "model: .*has no attribute 'Nothing'"),
        ("--config=nowhere.yaml", r"config: .*nowhere\.yaml"),
        ("--trainer.devices=0", "devices"),
    ],
)
def test_a_wrong_setting_is_one_line(run: Any, override: str, message: str) -> None:
    code, trainer, err = run(*override.split())
    assert code == 2
    assert trainer is None
    (line,) = [line for line in err.splitlines() if "Seed set" not in line]
    assert re.fullmatch(f"goose3d: error: .*{message}.*", line)


def test_a_bug_keeps_its_traceback(run: Any) -> None:
    with pytest.raises(ValueError, match=r"^a bug of the user's own$") as caught:
        run("--model.bug=true")
    assert any(entry.path.name == "cli_toy.py" for entry in caught.traceback)


def test_an_error_of_the_run_itself_keeps_its_traceback(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("lost a rank")

    monkeypatch.setattr(Trainer, "fit", fails)
    with pytest.raises(RuntimeError, match="lost a rank"):
        run()


@pytest.mark.parametrize(
    ("error", "rank", "said"),
    [
        (PlanError("tp=3 splits no head"), 0, "goose3d: error: tp=3 splits no head\n"),
        (PlanError("tp=3 splits no head"), 5, ""),
        (PlanError("no layers", rank=5), 5, "goose3d: error on rank 5: no layers [rank 5]\n"),
        (BatchError("empty"), 5, "goose3d: error on rank 5: empty\n"),
    ],
)
def test_what_all_ranks_find_is_said_once(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, rank: int, said: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(rank_zero_only, "rank", rank)
        raise error

    monkeypatch.setattr(Trainer, "fit", fails)
    code, _, err = run()
    assert code == 2
    assert err.endswith(said)
    assert err.count("goose3d: error") == (1 if said else 0)


class TestMain:
    @pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
    def test_help(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        for command in (
            *cli.SUBCOMMANDS,
            "export",
            "bench step",
            "bench engine",
            "bench optimizer",
        ):
            assert command in out

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["--version"]) == 0
        assert capsys.readouterr().out.startswith("goose3d ")

    @pytest.mark.parametrize("arguments", [["fut"], ["bench"], ["bench", "leap"]])
    def test_unknown_commands(
        self, arguments: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1

    @pytest.mark.parametrize("bench", [step, engine, optimizer])
    def test_bench_gets_its_arguments(
        self, bench: ModuleType, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[list[str]] = []
        monkeypatch.setattr(bench, "main", lambda arguments: seen.append(arguments) or 0)
        assert cli.main(["bench", bench.__name__.rpartition(".")[2], "--json"]) == 0
        assert seen == [["--json"]]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "arguments are required: checkpoint, out"),
            (["a", "b", "--shape", "2"], "unrecognized arguments: --shape"),
            (["absent", "out", "--dtype", "int8"], "dtype='int8' is not known"),
            (["absent", "out", "--tokenizer", "nowhere"], "tokenizer='nowhere' is no folder"),
            (["absent", "out"], "absent' does not exist"),
        ],
    )
    def test_a_wrong_export_is_one_line(
        self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["export", *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_folders_of_configs_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        (folder / "c.yaml").touch()
    monkeypatch.setattr(sys, "path", ["somewhere"])
    monkeypatch.chdir(tmp_path)
    cli.make_importable(["fit", "-c", "a/c.yaml", "--config=b/c.yaml", "--config", "missing.yaml"])
    assert sys.path == [str(first), str(second), str(tmp_path), "somewhere"]


def test_reports_are_condensed_to_what_is_wrong() -> None:
    report = """\
Parser key "trainer.strategy":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'str'>, <class 'Strategy'>]
  Errors:
    - Expected a <class 'str'>
    - Problem with given class_path 'a.B':
        Option 'tq' is not accepted
  Given value type: <class 'NestedArg'>
  Given value: NestedArg(key='tq', val='2')"""
    assert cli.condense(report) == (
        "trainer.strategy: Problem with given class_path 'a.B': Option 'tq' is not accepted"
    )
    assert cli.condense("unrecognized arguments: --x") == "unrecognized arguments: --x"


def test_the_summary_says_loss_speed_and_checkpoint(tmp_path: Path) -> None:
    bar, saver = Goose3DProgressBar(), ModelCheckpoint(dirpath=tmp_path)
    bar.meter = SimpleNamespace(tokens_per_second=5432.1)  # type: ignore[assignment]
    saver.last_model_path = "runs/x/last.ckpt"
    trainer: Any = SimpleNamespace(
        global_step=150,
        callback_metrics={"loss": torch.tensor(4.25)},
        progress_bar_callback=bar,
        checkpoint_callbacks=[saver],
    )
    text = cli.summary(trainer)
    for part in ("150 steps", "loss 4.2500", "5,432", "runs/x/last.ckpt"):
        assert part in text
