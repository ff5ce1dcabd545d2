"""``strategy="goose3d"``: the bare name in both of Lightning's registries.

Lightning has no plug-in discovery for strategies since 2.6.0, so ``import goose_strategy``
registers the name. The registered values are factories that import a door only when it is used:
a Fabric script never imports the Trainer.
"""

from __future__ import annotations

import importlib
from typing import Any

from goose_strategy.errors import ConfigError

NAME = "goose3d"
_DESCRIPTION = "Tensor x pipeline x data parallelism with ZeRO-1 for transformers causal LMs"


def fabric_factory(**arguments: Any) -> Any:
    """Build the Fabric strategy from arguments and ``GOOSE3D_*`` variables."""
    return _build("goose_strategy.strategies.fabric", arguments)


def trainer_factory(**arguments: Any) -> Any:
    """Build the Trainer strategy from arguments and ``GOOSE3D_*`` variables."""
    return _build("goose_strategy.strategies.pytorch", arguments)


def register() -> None:
    """Register the bare name in both registries; calling it again changes nothing."""
    from lightning.fabric.strategies import STRATEGY_REGISTRY

    if NAME not in STRATEGY_REGISTRY:
        STRATEGY_REGISTRY.register(NAME, fabric_factory, description=_DESCRIPTION)
    from lightning.pytorch.strategies import StrategyRegistry

    if NAME not in StrategyRegistry:
        StrategyRegistry.register(NAME, trainer_factory, description=_DESCRIPTION)


def refuse_twin(package: str) -> Any:
    """Refuse the bare name at a door of ``lightning_fabric`` or ``pytorch_lightning``.

    Raises:
        ConfigError: Always.
    """
    door = "lightning.fabric" if package == "lightning_fabric" else "lightning.pytorch"
    raise ConfigError(
        f"strategy={NAME!r} was given to {package}; goose3d works with {door}: import Fabric, "
        "Trainer and LightningModule from the package lightning."
    )


def _build(module: str, arguments: dict[str, Any]) -> Any:
    from goose_strategy.strategies.door import config_from_environment

    strategy = importlib.import_module(module).Goose3DStrategy
    return strategy(**{**config_from_environment(), **arguments})
