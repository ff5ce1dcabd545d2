"""What both doors share: settings, start-up, metric reduction, precision, refusals.

Lightning's two ``ParallelStrategy`` bases have clashing signatures, so no class can serve both.
Each door owns one :class:`Door` and translates its own hooks to it; nothing is written twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from goose_strategy.comm.collectives import barrier, broadcast_object
from goose_strategy.compat.torch import ShardedGradScaler
from goose_strategy.compat.transformers import non_persistent_float_buffers
from goose_strategy.errors import ConfigError
from goose_strategy.mesh.lane import LANES
from goose_strategy.optim.storage import check_storage
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.hooks import PipelineCallback
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.planning import LOGGER
from goose_strategy.runtime.settings import RuntimeConfig
from goose_strategy.strategies import compat
from goose_strategy.strategies.cards import backend_for, card_of, check_cards
from goose_strategy.strategies.private import private_loader, refuse_precision

if TYPE_CHECKING:
    from goose_strategy.optim.config import ZeroConfig

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "64-true")
"""Precisions that train today, by Lightning's names."""


@dataclass
class Door:
    """The runtime behind a strategy, and the translations that both strategies need.

    Args:
        config: Settings of the runtime.
        backend: Name of the process group backend, or ``None`` for the device's default.
        timeout: Time after which a collective of a process group fails.
    """

    config: RuntimeConfig
    backend: str | None = None
    timeout: timedelta | None = None
    runtime: ParallelRuntime = field(init=False)
    _adopted: list[PipelineCallback] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.runtime = ParallelRuntime(self.config)

    def start(self, environment: Any, device: torch.device, world_size: int) -> None:
        """Check the sizes, start the process group, build the mesh.

        Raises:
            ConfigError: If tp x pp does not divide the world; before any group exists.
        """
        self.runtime.check_world(world_size)
        if self.runtime.started:
            return
        show_messages()
        timeout = self.timeout or compat.default_pg_timeout
        bind = backend_for(self.backend, device) != "gloo"
        compat.connect_world(environment, device, backend=self.backend, timeout=timeout, bind=bind)
        self.runtime.start(device, timeout=timeout)

    def check_sizes(self, world_size: int, devices: Sequence[torch.device] | None = None) -> None:
        """Refuse what cannot work together, before any process is started.

        Args:
            world_size: Number of ranks.
            devices: The device of each rank on this machine.

        Raises:
            ConfigError: If the sizes do not multiply to the world, or ranks share a card that the
                backend does not let them share.
        """
        self.runtime.check_world(world_size)
        check_cards(devices, self.backend)

    def card(self, device: torch.device) -> torch.device:
        """Return the device that a rank computes on, of those that there are."""
        return card_of(device, self.backend)

    def prepare_precision(self, plugin: Any) -> None:
        """Check a precision plugin, and let it act on the whole model instead of one rank's part.

        Raises:
            ConfigError: If the precision does not train, or not with the optimizer's settings.
        """
        if self.config.privacy is not None:
            refuse_precision(plugin)
        check_precision(plugin, self.config.zero)
        keep_rotary_in_fp32(plugin)
        scaler = getattr(plugin, "scaler", None)
        if isinstance(scaler, torch.amp.GradScaler):
            plugin.scaler = ShardedGradScaler.over(scaler, self._unscale)
            self.runtime.scaler = plugin.scaler

    def _unscale(self, optimizer: Any, inverse: Tensor) -> Tensor | None:
        return self.runtime.unscale(compat.unwrap_optimizer(optimizer), inverse)

    def sampler_kwargs(self, rank: int, world_size: int) -> dict[str, int]:
        """Return ``num_replicas`` and ``rank`` of the data parallel axis.

        As with ``ddp``, no process needs to be there yet.

        Args:
            rank: Global rank.
            world_size: Number of ranks.
        """
        layout = self.runtime.check_world(world_size)
        return {"num_replicas": layout.dp, "rank": layout.coordinates(rank).dp}

    def reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a metric over data parallel replicas.

        The ranks of one replica hold the same value, so the world would count it tp x pp times;
        ``group=None`` and the world both mean the dp axis here.
        """
        if not isinstance(tensor, Tensor) or not self.runtime.started:
            return tensor
        if group is None or group is dist.group.WORLD:
            group = self.runtime.mesh.dp
            if group is None:
                return tensor
        if group in LANES:
            # What gloo does with a card's tensors depends on how torch was built.
            on_host = compat.sync_if_available(tensor.cpu(), group, reduce_op=reduce_op)
            return tensor.copy_(on_host)
        return compat.sync_if_available(tensor, group, reduce_op=reduce_op)

    def barrier(self) -> None:
        """Wait for all ranks, on the host: a device does not stand still for it."""
        if self.runtime.started:
            barrier(self.runtime.mesh.control)

    def broadcast(self, obj: Any, src: int) -> Any:
        """Return the object of rank ``src``."""
        if not self.runtime.started:
            return obj
        return broadcast_object(obj, source=src, group=self.runtime.mesh.control)

    def export(self, module: nn.Module, path: Any, settings: dict[str, Any]) -> None:
        """Write a model for the hub; the module may be in Fabric's wrapper."""
        self.runtime.export(compat.unwrap_module(module), path, **settings)

    def adopt(self, trainer: Any) -> None:
        """Register the pipeline callbacks of a Trainer, in its order.

        Those taken from its list since, or of an earlier Trainer, are let go.
        """
        hooks = self.runtime.hooks
        mine = [c for c in trainer.callbacks if isinstance(c, PipelineCallback)]
        for former in self._adopted:
            if former in hooks.callbacks and former not in mine:
                hooks.remove(former)
        adopted = [c for c in mine if c in self._adopted or c not in hooks.callbacks]
        for callback in mine:
            hooks.add(callback)
        self._adopted = adopted

    def process_dataloader(self, dataloader: Any) -> Any:
        """Seed workers by data parallel rank; mark batches that no sampler controls."""
        if not self.runtime.started:
            return dataloader
        compat.seed_workers(dataloader, self.runtime.mesh.dp_rank)
        if isinstance(getattr(dataloader, "dataset", None), IterableDataset):
            self.runtime.broadcast_batches()
        return private_loader(self.runtime, dataloader)


def show_messages() -> None:
    """Let the package's own messages be seen, as Lightning does with its own.

    Whoever has set up Python's logging decides alone.
    """
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.hasHandlers():
        LOGGER.addHandler(logging.StreamHandler())
        LOGGER.propagate = False


def build_config(tp: int, pp: int, **rooms: Any) -> RuntimeConfig:
    """Build the runtime's settings from a strategy's arguments."""
    return RuntimeConfig(tp=tp, pp=pp, **rooms)


def config_from_environment() -> dict[str, Any]:
    """Read sizes for the bare name ``strategy="goose3d"`` from ``GOOSE3D_*`` variables.

    ``GOOSE3D_TP``, ``GOOSE3D_PP``, ``GOOSE3D_SCHEDULE`` and ``GOOSE3D_NUM_MICROBATCHES``; with
    none set, the name means tp=pp=1: a drop-in for ``ddp``.

    Raises:
        ConfigError: If a number is no number, or the schedule is unknown.
    """
    sizes: dict[str, Any] = {}
    for name in ("tp", "pp"):
        if (value := _whole_from_environment(f"GOOSE3D_{name.upper()}")) is not None:
            sizes[name] = value
    pipeline = PipelineConfig()
    if (schedule := os.environ.get("GOOSE3D_SCHEDULE")) is not None:
        try:
            pipeline = replace(pipeline, schedule=schedule)
        except ConfigError as error:
            raise ConfigError(f"GOOSE3D_SCHEDULE={schedule!r}: {error}") from error
    if (count := _whole_from_environment("GOOSE3D_NUM_MICROBATCHES")) is not None:
        pipeline = replace(pipeline, num_microbatches=count)
    return {**sizes, "pipeline": pipeline}


def _whole_from_environment(name: str) -> int | None:
    value = os.environ.get(name)
    if value is None:
        return None
    try:
        return int(value)
    except ValueError as err:
        raise ConfigError(f"{name}={value!r} must be a whole number.") from err


def check_precision(plugin: Any, zero: ZeroConfig) -> None:
    """Refuse precisions that do not train, and states that a precision cannot have, by name.

    Raises:
        ConfigError: If the plugin's precision is not one of :data:`PRECISIONS`, or ``zero`` asks
            for what it cannot have.
    """
    name = compat.plugin_precision(plugin)
    if name not in PRECISIONS:
        listed = ", ".join(repr(choice) for choice in PRECISIONS)
        raise ConfigError(
            f"precision={name!r} is not supported by goose3d yet; choose one of {listed}."
        )
    check_storage(zero, name)


def keep_rotary_in_fp32(plugin: Any) -> None:
    """Make a precision plugin's ``convert_module`` leave derived buffers in their precision.

    ``bf16-true`` casts the whole module, rotary frequencies included, and positions beyond 256
    then collide; transformers itself keeps these non-persistent buffers in fp32.
    """
    convert: Callable[[nn.Module], nn.Module] = plugin.convert_module
    if isinstance(convert, _KeepingRotary):
        return
    plugin.convert_module = _KeepingRotary(convert)


class _KeepingRotary:
    """A ``convert_module`` that does not round what is computed from the config."""

    def __init__(self, convert: Callable[[nn.Module], nn.Module]) -> None:
        self._convert = convert

    def __call__(self, module: nn.Module) -> nn.Module:
        kept = [
            (owner, name, buffer.clone())
            for owner, name, buffer in non_persistent_float_buffers(module)
        ]
        module = self._convert(module)
        for owner, name, buffer in kept:
            cast = getattr(owner, name)
            if cast.dtype in (torch.bfloat16, torch.float16):
                setattr(owner, name, buffer.to(cast.device))
        return module


def wrong_door(package: str, here: str, other: str) -> str:
    """Return the hint that a strategy's ``repr`` carries for the error of the other door."""
    return (
        f"for {package}; in the other API use `from goose_strategy import {other}` instead of "
        f"{here}"
    )
