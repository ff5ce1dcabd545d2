"""Lightning's private APIs, each with what breaks when it moves.

A failure here after an update of Lightning says which function of compat.py needs a new home; the
tests of the doors would only say that something is wrong.
"""

from __future__ import annotations

import importlib
import inspect
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.wrappers import _FabricModule, _FabricOptimizer
from lightning.pytorch.core.optimizer import LightningOptimizer, _MockOptimizer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import precision as trainer_precision
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from goose_strategy.strategies import compat

# Where each helper lives, the arguments we pass, and what is lost without it.
MOVED = [
    (
        "lightning.fabric.strategies.launchers.subprocess_script:_SubprocessScriptLauncher",
        ("cluster_environment", "num_processes", "num_nodes"),
        "fabric.launch() starts no processes",
    ),
    (
        "lightning.pytorch.strategies.launchers.subprocess_script:_SubprocessScriptLauncher",
        ("cluster_environment", "num_processes", "num_nodes"),
        "trainer.fit() starts no processes",
    ),
    (
        "lightning.fabric.utilities.distributed:_init_dist_connection",
        ("cluster_environment", "torch_distributed_backend", "kwargs"),
        "no process group is made",
    ),
    (
        "lightning.fabric.utilities.distributed:_get_default_process_group_backend_for_device",
        ("device",),
        "the backend has to be named by the user",
    ),
    (
        "lightning.fabric.utilities.distributed:_sync_ddp_if_available",
        ("result", "group", "reduce_op"),
        "self.log(..., sync_dist=True) and fabric.all_reduce fail",
    ),
    (
        "lightning.fabric.strategies.strategy:_validate_keys_for_strict_loading",
        ("requested_keys", "checkpoint_keys", "strict"),
        "fabric.load does not say which keys are missing",
    ),
    (
        "lightning.fabric.utilities.seed:pl_worker_init_function",
        ("worker_id", "rank"),
        "loader workers of one replica draw different numbers",
    ),
    ("lightning.fabric.utilities.seed:reset_seed", (), "children forget the seed of the parent"),
]


@pytest.mark.parametrize(
    ("place", "arguments", "loss"), MOVED, ids=[place.split(":")[1] for place, _, _ in MOVED]
)
def test_a_helper_is_where_it_was(place: str, arguments: tuple[str, ...], loss: str) -> None:
    module, name = place.split(":")
    found = getattr(importlib.import_module(module), name, None)
    assert found is not None, f"{place} has moved; without it {loss}"
    taken = inspect.signature(found).parameters
    missing = [argument for argument in arguments if argument not in taken]
    assert not missing, f"{place} no longer takes {missing}; without it {loss}"


def test_every_helper_is_listed() -> None:
    assert all(hasattr(compat, name) for name in compat.__all__)


def test_sync_control_has_one_method() -> None:
    # fabric.no_backward_sync() asks the strategy's control by this name.
    assert compat.BackwardSyncControl is _BackwardSyncControl
    assert _BackwardSyncControl.__abstractmethods__ == {"no_backward_sync"}
    assert list(inspect.signature(_BackwardSyncControl.no_backward_sync).parameters) == [
        "self",
        "module",
        "enabled",
    ]


def test_the_default_timeout_is_a_timedelta() -> None:
    assert isinstance(compat.default_pg_timeout, timedelta)


def test_ranks_reach_the_environment_and_rank_zero_helpers() -> None:
    # Both helpers keep the rank as an attribute of the function; without it all ranks print.
    before = rank_zero_only.rank, utilities_rank_zero_only.rank
    environment = LightningEnvironment()
    try:
        compat.set_world_ranks(environment, rank=3, world_size=8)
        assert (environment.global_rank(), environment.world_size()) == (3, 8)
        assert rank_zero_only.rank == utilities_rank_zero_only.rank == 3
        compat.set_world_ranks(None, rank=5, world_size=8)
        assert rank_zero_only.rank == 3
    finally:
        rank_zero_only.rank, utilities_rank_zero_only.rank = before


def test_the_device_mesh_is_read_from_a_private_attribute() -> None:
    module = BoringModel()
    compat.set_device_mesh(module, "mesh")
    assert module.device_mesh == "mesh"
    compat.set_device_mesh(None, "mesh")


@pytest.mark.parametrize(
    ("plugin", "name"),
    [
        (Precision(), "32-true"),
        (HalfPrecision("bf16-true"), "bf16-true"),
        (HalfPrecision("16-true"), "16-true"),
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed"),
        (DoublePrecision(), "64-true"),
        (trainer_precision.Precision(), "32-true"),
        (trainer_precision.HalfPrecision("bf16-true"), "bf16-true"),
        (trainer_precision.DoublePrecision(), "64-true"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__module__.split(".")[1],
)
def test_a_precision_plugin_tells_its_name(plugin: Any, name: str) -> None:
    # Refusals by name read it; a plugin without one is called by its class.
    assert compat.plugin_precision(plugin) == name
    assert compat.plugin_precision(object()) == "object"


def test_both_wrappers_keep_the_optimizer_under_one_name() -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert compat.unwrap_optimizer(optimizer) is optimizer
    fabric = _FabricOptimizer(optimizer, strategy=None)  # type: ignore[arg-type]
    assert compat.unwrap_optimizer(fabric) is optimizer
    assert compat.unwrap_optimizer(LightningOptimizer(optimizer)) is optimizer
    with pytest.raises(TypeError, match="object is no torch optimizer"):
        compat.unwrap_optimizer(object())


def test_a_module_is_found_behind_fabrics_wrapper() -> None:
    module = nn.Linear(1, 1)
    assert compat.unwrap_module(module) is module
    assert compat.unwrap_module(_FabricModule(module, strategy=None)) is module  # type: ignore[arg-type]


def test_the_stand_in_for_no_optimizer_is_known() -> None:
    # A LightningModule whose configure_optimizers returns None gets one; its tensor is nobody's.
    real = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert compat.without_mocks([_MockOptimizer(), real]) == [real]


def test_workers_are_seeded_by_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader([1], num_workers=0)
    compat.seed_workers(loader, 3)
    assert loader.worker_init_fn is None, "seed_everything(workers=True) was not asked for"
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    # Fabric has set its own by then, with the global rank; the Trainer sets one where none is.
    for before in (None, partial(pl_worker_init_function, rank=7)):
        loader = DataLoader([1], worker_init_fn=before)
        compat.seed_workers(loader, 3)
        seeded: Any = loader.worker_init_fn
        assert seeded.func is pl_worker_init_function
        assert seeded.keywords == {"rank": 3}
    mine = DataLoader([1], worker_init_fn=print)
    compat.seed_workers(mine, 3)
    assert mine.worker_init_fn is print
    compat.seed_workers([[1], [2]], 3)  # no DataLoader: nothing to seed


def test_classes_of_callbacks_are_known_by_name() -> None:
    class Mine(pl.Callback):
        pass

    assert {"Mine", "Callback"} <= compat.class_names([Mine()])


def test_lightning_asks_for_what_the_doors_answer() -> None:
    # The Trainer reads this attribute by name: without it no sampler is distributed.
    connector = importlib.import_module(
        "lightning.pytorch.trainer.connectors.accelerator_connector"
    )
    source = inspect.getsource(connector._AcceleratorConnector.is_distributed.fget)
    assert 'hasattr(self.strategy, "is_distributed")' in source
    # A backward of the strategy's own makes Fabric refuse a plain loss.backward().
    wrappers = importlib.import_module("lightning.fabric.wrappers")
    assert "is_overridden" in inspect.getsource(wrappers._FabricModule._register_backward_hook)


def test_torchs_tensors_have_the_types_that_reduce() -> None:
    # _sync_ddp_if_available returns its argument where no group exists.
    value = torch.ones(())
    assert compat.sync_if_available(value, None, reduce_op="mean") is value


def test_an_export_finds_the_module_in_fabrics_wrapper() -> None:
    module = nn.Linear(2, 2)
    assert compat.unwrap_module(module) is module
    assert compat.unwrap_module(_FabricModule(module, strategy=None)) is module
