"""What one run of a benchmark is: plain values that cross a process border as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from goose_strategy import validate
from goose_strategy.errors import ConfigError

CONTENDERS = ("single", "ddp", "goose3d")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One contender in one round, and the work that all contenders share.

    Attributes:
        contender: ``"single"``, ``"ddp"`` or ``"goose3d"``.
        devices: Processes of this contender.
        replicas: Data-parallel replicas of the goose3d layout; the global batch is that many of
            the recipe's batches, for every contender.
        strategy: Arguments of the goose3d strategy.
        config: Path of the recipe, or None for the built-in model.
        accelerator: Lightning's name of the accelerator.
        precision: Lightning's name of the precision.
        clip: ``gradient_clip_val`` of the recipe, or None.
        steps: Timed steps.
        warmup: Steps before them.
        threads: Threads per process.
        seed: Seed of weights and data.
    """

    contender: str = "goose3d"
    devices: int = 4
    replicas: int = 2
    strategy: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    accelerator: str = "cpu"
    precision: str = "32-true"
    clip: float | None = None
    steps: int = 10
    warmup: int = 3
    threads: int = 1
    seed: int = 1

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: Naming the setting and what is allowed.
        """
        validate.one_of(CONTENDERS, contender=self.contender)
        validate.at_least(1, steps=self.steps, warmup=self.warmup, threads=self.threads)

    def dump(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class EngineJob:
    """The measurement of `goose3d bench engine` on one number of ranks.

    Attributes:
        devices: Processes, one rank of the pipeline each.
        microbatches: Microbatches per step.
        steps: Timed steps of each schedule, under each runtime.
        warmup: Steps before them.
        shared_memory: Let the engine send through shared memory where it can.
        forward_s: Seconds that a stage's forward sleeps; its backward sleeps twice as long, half of
            it for the weights.
        seed: Seed of weights and data.
    """

    contender: ClassVar[str] = "engine"
    threads: ClassVar[int] = 1

    devices: int
    microbatches: int = 8
    steps: int = 5
    warmup: int = 1
    shared_memory: bool = True
    forward_s: float = 0.03
    seed: int = 1

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigError: Naming the setting and what is allowed.
        """
        validate.at_least(2, ranks=self.devices)
        validate.at_least(1, steps=self.steps, warmup=self.warmup)
        validate.positive(forward_s=self.forward_s)
        if self.microbatches < self.devices:
            raise ConfigError(
                f"microbatches={self.microbatches} is less than ranks={self.devices}, which "
                f"torch's 1F1B refuses; choose microbatches >= {self.devices}."
            )

    def dump(self) -> str:
        """Return the job as JSON."""
        return json.dumps(asdict(self))


def load_engine(text: str) -> EngineJob:
    """Return the job that `EngineJob.dump` wrote."""
    return EngineJob(**json.loads(text))


def load(text: str) -> Job:
    """Return the job that `Job.dump` wrote."""
    return Job(**json.loads(text))


def read_recipe(path: str) -> dict[str, Any]:
    """Return a LightningCLI config file as a dictionary.

    Raises:
        ConfigError: If the file is missing, or names no model and data.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"config={path!r} does not exist; pass the path of a LightningCLI config."
        )
    recipe = yaml.safe_load(file.read_text())
    missing = [key for key in ("model", "data") if not _get(recipe, key)]
    if missing:
        raise ConfigError(
            f"config={path!r} has no {' and no '.join(missing)}; bench step needs a "
            "LightningModule (model:) and a LightningDataModule (data:)."
        )
    return dict(recipe)


def settings_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a recipe's trainer section says about a `Job`: devices, strategy, precision."""
    trainer = _get(recipe, "trainer") or {}
    found = {
        "devices": trainer.get("devices"),
        "accelerator": trainer.get("accelerator"),
        "precision": trainer.get("precision"),
        "clip": trainer.get("gradient_clip_val"),
        "seed": recipe.get("seed_everything"),
        "strategy": _get(trainer.get("strategy"), "init_args"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _get(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, Mapping) else None
