"""The console script ``goose3d``: LightningCLI's subcommands, and the tools of this package.

Beside a bare ``LightningCLI`` it has imported the strategies (so that ``strategy: goose3d`` and
short class names are known), finds classes that lie beside the config file, answers a wrong setting
with one line instead of a traceback, and says at the end of a fit what came out.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from argparse import ArgumentError, ArgumentParser
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

import goose_strategy.strategies.private
import goose_strategy.strategies.pytorch
import goose_strategy.strategies.timeline  # noqa: F401  makes bare class names known
from goose_strategy.bench import engine, optimizer, step, timeline
from goose_strategy.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    GooseError,
    PlanError,
)
from goose_strategy.strategies import progress
from goose_strategy.validate import one_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

SUBCOMMANDS = ("fit", "validate", "test", "predict")
HELP = """\
usage: goose3d COMMAND [options]

Train with a LightningModule and a LightningDataModule (see `goose3d fit --help`):
  fit        --config recipe.yaml [--trainer.strategy.tp=2 ...]
  validate   --config recipe.yaml --ckpt_path PATH
  test       --config recipe.yaml --ckpt_path PATH
  predict    --config recipe.yaml --ckpt_path PATH

Publish:
  export CKPT OUT [--dtype bf16] [--tokenizer DIR]   write a checkpoint's model for the hub

Measure:
  bench step [--config recipe.yaml] [--json]   step time beside one process and Fabric ddp
  bench engine [--json]                        pipelined steps beside torch's own runtime
  bench optimizer [--json]                     the optimizer's step beside torch's fused kernel
  bench privacy [--json]                       private calls beside ordinary ones, and Opacus
  timeline DIR [--out x.png] [--step N]        draw a step that TimelineRecorder recorded

Classes named in a config are looked for beside the config file, then in the current folder, then
among the installed packages.

options:
  -h, --help   show this help and exit
  --version    show the version and exit
"""

# What is wrong is in the settings, the model or the files; the traceback into this package would
# only hide the message. Every other error is a bug, or a lost rank, and keeps its traceback.
_USER_ERRORS = (ConfigError, PlanError, BatchError, CheckpointError, MisconfigurationException)
# These are found before, or equally on, all ranks: one rank is enough to say it.
_SAME_ON_ALL_RANKS = (ConfigError, PlanError, MisconfigurationException)

# Lines of jsonargparse's nested reports that say how it tried, not what is wrong.
_NOISE = re.compile(
    r"^(Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|Given value.*"
    r"|- Expected a <class '(NoneType|str)'>\.?)$"
)

# What `--trainer.strategy.tp=2` on top of `strategy: goose3d` needs to be told.
_BARE_NAME = (
    r"\1 is a bare name, which takes no arguments; write class_path: goose_strategy.Goose3DStrategy"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``goose3d``.

    Args:
        argv: Arguments after the program's name; ``sys.argv[1:]`` if None.

    Returns:
        The exit code: 0, or 2 for a wrong setting.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        sys.stdout.write(HELP)
        return 0
    if command == "--version":
        sys.stdout.write(f"goose3d {_version()}\n")
        return 0
    try:
        if command == "bench":
            return _bench(arguments[1:])
        if command == "timeline":
            return timeline.main(arguments[1:])
        if command == "export":
            return _export(arguments[1:])
        if command not in SUBCOMMANDS:
            known = ", ".join((*SUBCOMMANDS, "export", "bench", "timeline"))
            raise ConfigError(f"command={command!r} is not known; choose one of {known}.")
        make_importable(arguments)
        # Lightning's loops call this on every rank; a user cannot act on it.
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)`")
        Goose3DCLI(args=None if argv is None else arguments)
    except ArgumentError as error:
        _say(ConfigError(condense(str(error))))
        return 2
    except _USER_ERRORS as error:
        _say(error)
        return 2
    return 0


def _bench(arguments: list[str]) -> int:
    asked = arguments[0] if arguments else ""
    if asked in ("-h", "--help"):
        print(HELP)
        return 0
    one_of(("step", "engine", "optimizer", "privacy"), bench=asked)
    if asked == "privacy":
        # Its settings ask for packages that only private training needs.
        from goose_strategy.bench import privacy

        return privacy.main(arguments[1:])
    if asked == "engine":
        return engine.main(arguments[1:])
    if asked == "optimizer":
        return optimizer.main(arguments[1:])
    make_importable(arguments)
    return step.main(arguments[1:])


class _OneLineParser(ArgumentParser):
    """Raises what is wrong, where argparse prints the usage and exits."""

    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help.")


def _export(arguments: list[str]) -> int:
    parser = _OneLineParser(prog="goose3d export")
    parser.add_argument("checkpoint", help="folder that fabric.save or ModelCheckpoint wrote")
    parser.add_argument("out", help="folder to write; must not exist")
    parser.add_argument("--dtype", help="bf16, fp16, fp32 or fp64; as saved if not given")
    parser.add_argument("--max-shard-size", default="5GB", help="largest file (default: 5GB)")
    parser.add_argument("--tokenizer", help="folder whose tokenizer files are copied")
    parser.add_argument("--model", help="which model, if the checkpoint holds several")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    asked = parser.parse_args(arguments)
    from goose_strategy.hub.config import ExportConfig
    from goose_strategy.runtime.export import export_checkpoint

    settings = ExportConfig(
        dtype=asked.dtype,
        max_shard_size=asked.max_shard_size,
        overwrite=asked.overwrite,
        tokenizer=asked.tokenizer,
    )
    export_checkpoint(asked.checkpoint, asked.out, settings, entry=asked.model)
    sys.stdout.write(f"goose3d: {asked.out} written\n")
    return 0


def _say(error: Exception) -> None:
    """Print a wrong setting as one line; the same line once, not once per rank."""
    rank = getattr(rank_zero_only, "rank", None) or 0
    own = isinstance(error, GooseError) and error.rank is not None
    if rank == 0 or own or not isinstance(error, _SAME_ON_ALL_RANKS):
        where = f" on rank {rank}" if rank else ""
        sys.stderr.write(f"goose3d: error{where}: {error}\n")


def _version() -> str:
    try:
        return version("goose-strategy")
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "unknown"


def make_importable(arguments: Sequence[str]) -> None:
    """Put the folders of the config files, then the current one, in front of the import path.

    Args:
        arguments: The command line; ``--config FILE``, ``--config=FILE`` and ``-c FILE`` count.
    """
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    files = [value for flag, value in pairs if flag in ("--config", "-c")]
    files += [text.partition("=")[2] for text in arguments if text.startswith("--config=")]
    folders = [str(Path(file).resolve().parent) for file in files if Path(file).is_file()]
    wanted = dict.fromkeys([*folders, os.getcwd()])
    sys.path[:0] = [folder for folder in wanted if folder not in sys.path]


def condense(message: str) -> str:
    """Return one line that says what is wrong out of a report of jsonargparse."""
    lines = [line.strip() for line in message.splitlines()]
    told = [line.removeprefix("- ") for line in lines if line and not _NOISE.match(line)]
    text = " ".join(told) if told else " ".join(lines)
    text = re.sub(r"Parser key \"([^\"]+)\":", r"\1:", text)
    return re.sub(r"Expected a dot import path string: (\w+)$", _BARE_NAME, text)


class Goose3DParser(LightningArgumentParser):
    """A parser that raises: upstream's prints the usage of all 200 options before its error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"exit_on_error": False, **kwargs})


class Goose3DCLI(LightningCLI):
    """LightningCLI with this package's strategies known, one-line errors and a closing summary.

    Args:
        args: The command line, or None for ``sys.argv``.
    """

    def __init__(self, args: list[str] | None = None) -> None:
        self._failures: list[Exception] = []
        super().__init__(
            parser_class=Goose3DParser,
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            args=args,
        )

    @override
    def before_instantiate_classes(self) -> None:
        self.parser.add_instantiator(self._instantiate, object, subclasses=True)

    def _instantiate(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return class_type(*args, **kwargs)
        except Exception as error:
            self._failures.append(error)
            raise

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ConfigError:
            raise
        except (TypeError, ValueError) as report:
            cause = self._failures[-1] if self._failures else report.__cause__
            if cause is None:
                raise
        else:
            return
        # jsonargparse reports every type of a union that did not fit, and drops or buries the
        # error that a class raised; that error is the one to see.
        raise cause

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except ValueError as error:  # a value that the Trainer refuses, such as a strategy's name
            raise ConfigError(str(error)) from error

    def after_fit(self) -> None:
        """Say what came out, once."""
        if self.trainer.is_global_zero:
            sys.stdout.write(summary(self.trainer))


def summary(trainer: Trainer) -> str:
    """Return the closing lines of a fit: the last metrics, the speed, where the checkpoint lies."""
    lines = [f"goose3d: {trainer.global_step} steps done"]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if metrics:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        lines.append(f"  last metrics  {shown}")
    bar = trainer.progress_bar_callback
    rate = bar.meter.tokens_per_second if isinstance(bar, progress.ThroughputBar) else None
    if rate is not None:
        lines.append(f"  tokens/s      {rate:,.0f}")
    savers = [saver for saver in trainer.checkpoint_callbacks if isinstance(saver, ModelCheckpoint)]
    paths = [saver.last_model_path or saver.best_model_path for saver in savers]
    lines += [f"  checkpoint    {path}" for path in paths if path]
    return "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
