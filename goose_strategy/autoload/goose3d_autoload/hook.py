"""Makes ``strategy="goose3d"`` known without an import, where ``GOOSE3D_AUTOLOAD=1`` is set.

Lightning discovers no strategies of other packages. torch does load entry points of the group
``torch.backends``, at the end of its own import: torch is not complete then, and Lightning may be
half imported above it, so nothing may be imported here. The entry point therefore waits for the
program to import Lightning's registries and puts a name into them that imports the package when it
is used.

It is installed beside ``goose_strategy``, not inside of it: an entry point in there would execute
the package's ``__init__`` first, which imports Lightning, and an error there would end
``import torch``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

NAME = "goose3d"
VARIABLE = "GOOSE3D_AUTOLOAD"
# Modules that offer a registry, and its name there. The twins are refused: a LightningModule of the
# one package is none for the other.
REGISTRIES = {
    "lightning.fabric.strategies": "STRATEGY_REGISTRY",
    "lightning.pytorch.strategies": "StrategyRegistry",
    "lightning_fabric.strategies": "STRATEGY_REGISTRY",
    "pytorch_lightning.strategies": "StrategyRegistry",
}
_DESCRIPTION = "Tensor x pipeline x data parallelism with ZeRO-1 for transformers causal LMs"


def autoload() -> None:
    """Entry point: install the hook if the variable asks for it; never raise.

    An error would end ``import torch`` of every program in the environment.
    """
    setting = os.environ.get(VARIABLE, "0")
    if setting == "1":
        if not any(isinstance(finder, Hook) for finder in sys.meta_path):
            sys.meta_path.insert(0, Hook())
    elif setting not in ("", "0"):
        warnings.warn(f"{VARIABLE}={setting!r} must be 0 or 1; it is ignored.", stacklevel=2)


class Hook(MetaPathFinder):
    """Finds nothing itself, but has a registry filled when its module has been executed."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol's
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that calls us back."""
        if fullname not in REGISTRIES or fullname in self._finding:
            return None
        self._finding.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Executes a module as its own loader would, then registers; no trace of it stays.

    Args:
        own: The module's loader.
    """

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        module.__loader__ = self._own
        self._own.exec_module(module)
        try:
            register(module)
        except Exception as error:  # noqa: BLE001 - whatever it is, Lightning works without us
            warnings.warn(
                f"{VARIABLE}=1: strategy={NAME!r} could not be registered in {module.__name__}: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )


def register(module: ModuleType) -> None:
    """Put the bare name into the registry of one of the modules in ``REGISTRIES``."""
    registry = getattr(module, REGISTRIES[module.__name__])
    if NAME not in registry:
        registry.register(NAME, _factory_of(module.__name__), description=_DESCRIPTION)


def _factory_of(module: str) -> Callable[..., Any]:
    """Return what builds the strategy of a door; it imports the package when it is called."""
    package, _, door = module.removesuffix(".strategies").partition(".")

    def build(**arguments: Any) -> Any:
        from goose_strategy.strategies import registry

        if package != "lightning":
            return registry.refuse_twin(package)
        make = registry.fabric_factory if door == "fabric" else registry.trainer_factory
        return make(**arguments)

    return build
