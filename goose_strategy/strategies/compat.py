"""Every private or semi-private API of Lightning that goose-strategy uses, in one place.

Lightning has no public way for a third-party strategy to start processes, set ranks or control
gradient sync; its own strategies use these helpers. When one moves, the test of this file names
it. Tested with lightning 2.6.4 to 2.6.6.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as FabricScriptLauncher,
)
from lightning.fabric.strategies.strategy import (
    _BackwardSyncControl as BackwardSyncControl,
)
from lightning.fabric.strategies.strategy import (
    _validate_keys_for_strict_loading as validate_keys_for_strict_loading,
)
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_backend,
)
from lightning.fabric.utilities.distributed import (
    _init_dist_connection,
)
from lightning.fabric.utilities.distributed import (
    _sync_ddp_if_available as sync_if_available,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import pl_worker_init_function, reset_seed
from lightning.fabric.wrappers import _unwrap_objects
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as TrainerScriptLauncher,
)
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from lightning.fabric.plugins import ClusterEnvironment

__all__ = [
    "BackwardSyncControl",
    "FabricScriptLauncher",
    "TrainerScriptLauncher",
    "class_names",
    "connect_world",
    "default_backend",
    "default_pg_timeout",
    "plugin_precision",
    "seed_workers",
    "set_device_mesh",
    "set_world_ranks",
    "sync_if_available",
    "unwrap_module",
    "unwrap_optimizer",
    "validate_keys_for_strict_loading",
    "without_mocks",
]


def set_world_ranks(environment: ClusterEnvironment | None, *, rank: int, world_size: int) -> None:
    """Tell the cluster environment and Lightning's rank-zero helpers who this process is."""
    if environment is None:
        return
    environment.set_global_rank(rank)
    environment.set_world_size(world_size)
    for decorator in (rank_zero_only, utilities_rank_zero_only):
        vars(decorator)["rank"] = environment.global_rank()


def connect_world(
    environment: ClusterEnvironment,
    device: torch.device,
    *,
    backend: str | None,
    timeout: timedelta | None,
    bind: bool = True,
) -> None:
    """Start the default process group the way Lightning's own strategies do.

    Args:
        environment: Knows rank, size and address.
        device: Device of this rank.
        backend: Name of the backend; the device's default if ``None``.
        timeout: After how long an operation fails.
        bind: Let the group belong to the device. torch then uses it for objects and barriers.
    """
    reset_seed()
    _init_dist_connection(
        environment,
        backend or default_backend(device),
        timeout=timeout or default_pg_timeout,
        device_id=device if bind and device.type != "cpu" else None,
    )


def set_device_mesh(module: Any, mesh: Any) -> None:
    """Make ``LightningModule.device_mesh`` return ``mesh``."""
    if module is not None:
        module._device_mesh = mesh


def plugin_precision(plugin: Any) -> str:
    """Return the precision string of a precision plugin of either door."""
    return str(getattr(plugin, "precision", type(plugin).__name__))


def unwrap_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module behind Fabric's wrapper; any other module is returned as it is."""
    inner: torch.nn.Module = _unwrap_objects(module)
    return inner


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer behind Fabric's or the Trainer's wrapper."""
    inner = getattr(optimizer, "_optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"{type(optimizer).__name__} is no torch optimizer.")
    return inner


def without_mocks(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return optimizers without the stand-in that Lightning makes where there is none."""
    return [o for o in optimizers if type(o).__name__ != "_MockOptimizer"]


def seed_workers(dataloader: Any, dp_rank: int) -> None:
    """Seed the loader's workers by the data parallel rank instead of the global rank.

    Lightning seeds workers by the global rank, so that random augmentation or masking would
    differ between the ranks of one model replica. A user's own init function stays.
    """
    seeded = int(os.environ.get("PL_SEED_WORKERS", "0"))
    # The Trainer takes any iterable for a loader.
    if not seeded or not isinstance(dataloader, DataLoader):
        return
    current: Callable[..., Any] | None = getattr(dataloader, "worker_init_fn", None)
    if current is None or getattr(current, "func", None) is pl_worker_init_function:
        dataloader.worker_init_fn = partial(pl_worker_init_function, rank=dp_rank)


def class_names(callbacks: Iterable[Any]) -> set[str]:
    """Return the class names of callbacks and of their bases, to recognise them by name."""
    return {base.__name__ for callback in callbacks for base in type(callback).__mro__}
