"""What the Trainer offers that cannot work on shards, refused by name before any step.

Each of these either copies the module, swaps its optimizers, or reads the whole of its weights;
on a shard it would run and be wrong.
"""

from __future__ import annotations

from typing import Any

from goose_strategy.errors import ConfigError
from goose_strategy.strategies import compat

_REFUSED = {
    "LearningRateFinder": "it swaps the optimizer between trials; set the learning rate yourself",
    "BatchSizeFinder": "it restores whole checkpoints between trials; set batch_size yourself",
    "StochasticWeightAveraging": "it deep-copies the module, which here is a shard",
    "WeightAveraging": "it deep-copies the module, which here is a shard",
}


def refuse_callbacks(trainer: Any) -> None:
    """Refuse callbacks that cannot work on a sharded module.

    Raises:
        ConfigError: Naming the callback and what to do instead.
    """
    names = compat.class_names(trainer.callbacks)
    for name, reason in _REFUSED.items():
        if name in names:
            raise ConfigError(f"callback {name} does not work with strategy='goose3d': {reason}.")


def refuse_twin_package(model: object) -> None:
    """Refuse a LightningModule of the twin package ``pytorch_lightning``.

    Raises:
        ConfigError: If the module's base comes from ``pytorch_lightning``.
    """
    bases = [base for base in type(model).__mro__ if base.__name__ == "LightningModule"]
    if any(base.__module__.split(".")[0] == "pytorch_lightning" for base in bases):
        raise ConfigError(
            f"{type(model).__name__} derives from pytorch_lightning.LightningModule; goose3d "
            "works with lightning.pytorch: import LightningModule and Trainer from there."
        )
