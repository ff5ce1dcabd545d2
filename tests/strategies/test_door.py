"""What both doors share: settings, precision, reductions over replicas, loaders."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from goose_strategy import Goose3DFabricStrategy, Goose3DStrategy, ZeroConfig
from goose_strategy.compat.torch import ShardedGradScaler
from goose_strategy.errors import ConfigError
from goose_strategy.privacy.config import PrivacyConfig
from goose_strategy.runtime.planning import LOGGER
from goose_strategy.runtime.settings import RuntimeConfig
from goose_strategy.strategies.door import (
    PRECISIONS,
    Door,
    build_config,
    keep_rotary_in_fp32,
    show_messages,
    wrong_door,
)
from tests.harness.models import batches, tiny_model
from tests.harness.streams import FakeLane, staged
from tests.harness.worker import Context
from tests.strategies.ranks import good, make_fabric, world

# -- samplers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "pp", "expected"), [(1, 1, (8, 5)), (2, 1, (4, 2)), (2, 2, (2, 0))])
def test_the_place_of_a_rank_among_the_data_is_known_before_any_process(
    tp: int, pp: int, expected: tuple[int, int]
) -> None:
    place = Door(build_config(tp, pp)).sampler_kwargs(5, 8)
    assert (place["num_replicas"], place["rank"]) == expected


def test_samplers_can_be_made_before_the_launch_as_with_ddp() -> None:
    fabric = Fabric(accelerator="cpu", devices=4, strategy="goose3d")
    assert fabric.strategy.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 0}  # type: ignore[attr-defined]
    trainer = Trainer(accelerator="cpu", devices=4, strategy="goose3d", logger=False)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 0}


# -- precision ----------------------------------------------------------------------------------


class Named(Precision):
    """A plugin of a precision that needs a package or a device."""

    def __init__(self, name: str) -> None:
        self.precision = name  # type: ignore[assignment]


@pytest.mark.parametrize("name", ["16-true", "transformer-engine", "bitsandbytes"])
def test_precisions_that_do_not_train_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"precision='{name}' is not supported.*'bf16-mixed'"):
        Goose3DFabricStrategy(precision=Named(name))
    with pytest.raises(ConfigError, match=f"precision='{name}'"):
        Goose3DStrategy(precision_plugin=Named(name))  # type: ignore[arg-type]


def test_half_precision_is_refused_before_any_group() -> None:
    for start in (Fabric, Trainer):
        with pytest.raises(ConfigError, match="precision='16-true'"):
            start(accelerator="cpu", devices=2, strategy="goose3d", precision="16-true")
    assert not dist.is_initialized()


# On the CPU Lightning makes bf16-mixed of 16-mixed, with a warning.
@pytest.mark.parametrize("name", [name for name in PRECISIONS if name != "16-mixed"])
def test_the_others_are_taken_at_both_doors(name: Any) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, strategy="goose3d", precision=name)
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy="goose3d", precision=name, logger=False
    )
    assert fabric.strategy.precision.precision == name
    assert trainer.strategy.precision_plugin.precision == name


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("32-true", {"preset": "compact"}, "preset='compact' .*precision='32-true'.*main='fp32'"),
        ("bf16-mixed", {"main": "bf16+8"}, "main='bf16[+]8' .*precision='bf16-mixed'"),
        ("16-mixed", {"preset": "default"}, "preset='default' .*precision='16-mixed'"),
        ("32-true", {"grads": "bf16"}, "grads='bf16' .*precision='32-true'"),
        ("64-true", {"exp_avg_sq": "8bit"}, "exp_avg_sq='8bit' .*precision='64-true'"),
        ("64-true", {"skip_nonfinite": True}, "skip_nonfinite=True .*precision='64-true'"),
        ("64-true", {"grads": "bf16"}, "grads='bf16' .*precision='64-true'"),
    ],
)
def test_states_that_a_precision_cannot_have_are_refused_by_name(
    name: str, settings: dict[str, Any], wanted: str
) -> None:
    zero = ZeroConfig(**settings)
    with pytest.raises(ConfigError, match=wanted):
        Goose3DFabricStrategy(zero=zero, precision=Named(name))
    with pytest.raises(ConfigError, match=wanted):
        Goose3DStrategy(zero=zero, precision_plugin=Named(name))  # type: ignore[arg-type]


def test_states_that_a_precision_can_have_are_taken() -> None:
    for name, settings in (
        ("bf16-true", {"preset": "compact"}),
        ("bf16-true", {"grads": "bf16", "main": "bf16"}),
        ("32-true", {"preset": "compact", "main": "fp32"}),
        ("16-mixed", {"exp_avg": "bf16", "skip_nonfinite": True}),
        ("64-true", {"preset": "fp32"}),
    ):
        Goose3DFabricStrategy(zero=ZeroConfig(**settings), precision=Named(name))


def test_the_scaler_of_a_plugin_keeps_its_settings_and_its_type() -> None:
    user = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=7)
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=user)
    for strategy in (Goose3DFabricStrategy(precision=plugin), Goose3DFabricStrategy()):
        strategy.precision = plugin
        scaler = plugin.scaler
        assert isinstance(scaler, ShardedGradScaler)
        assert scaler.state_dict() == user.state_dict()
        assert strategy.runtime.scaler is scaler


def test_a_cast_leaves_rotary_frequencies_in_fp32() -> None:
    plugin = HalfPrecision("bf16-true")
    keep_rotary_in_fp32(plugin)
    keep_rotary_in_fp32(plugin)
    whole = tiny_model("llama", dtype=torch.float32)
    exact = whole.model.rotary_emb.inv_freq.clone()
    model = plugin.convert_module(whole)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, exact)
    assert "model.rotary_emb.inv_freq" not in model.state_dict()


def test_a_cast_takes_buffers_that_are_saved_along() -> None:
    plugin = HalfPrecision("bf16-true")
    keep_rotary_in_fp32(plugin)
    assert plugin.convert_module(nn.BatchNorm1d(2)).running_mean.dtype == torch.bfloat16


def test_a_plugin_clips_by_the_strategy_it_is_given_to() -> None:
    plugin = Trainer(accelerator="cpu", devices=1, logger=False).precision_plugin
    first, second = Goose3DStrategy(), Goose3DStrategy()
    first.precision_plugin = plugin
    second.precision_plugin = plugin
    clip: Any = vars(plugin)["clip_grad_by_norm"]
    with pytest.raises(ConfigError, match="SGD is not attached"):
        clip(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1), 1.0)
    assert second in [cell.cell_contents for cell in clip.__closure__]


# -- settings -----------------------------------------------------------------------------------


def test_rooms_become_one_config() -> None:
    config = build_config(2, 4, privacy=None)
    assert isinstance(config, RuntimeConfig)
    assert (config.tp, config.pp) == (2, 4)


def test_private_training_is_handed_on() -> None:
    privacy = PrivacyConfig(noise_multiplier=1.0)
    assert build_config(1, 1, privacy=privacy).privacy is privacy
    assert build_config(1, 1, privacy=None).privacy is None
    with pytest.raises(ConfigError, match="privacy="):
        build_config(1, 1, privacy={})


def test_the_hint_names_both_classes() -> None:
    hint = wrong_door("lightning.fabric.Fabric", "Here", "There")
    assert "lightning.fabric.Fabric" in hint
    assert "from goose_strategy import There` instead of Here" in hint


# -- before the processes are there -------------------------------------------------------------


def test_a_closed_door_passes_everything_through() -> None:
    door = Door(RuntimeConfig())
    loader = DataLoader([1])
    assert door.process_dataloader(loader) is loader
    assert door.broadcast("mine", 1) == "mine"
    assert door.reduce(torch.ones(()), None, "sum").item() == 1.0
    assert door.reduce("no tensor", None, "sum") == "no tensor"
    door.barrier()


# -- with them ----------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield from range(2)


def _reductions(ctx: Context) -> dict[str, Any]:
    fabric = make_fabric(ctx, 1, 2)  # pp2, dp2
    strategy = fabric.strategy
    mine = torch.tensor(float(strategy.data_parallel_rank + 1))
    pair = strategy.runtime.mesh.model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Lightning calls what torch deprecates
        gathered = fabric.all_gather(torch.tensor(ctx.rank)).tolist()
    return {
        "place": (strategy.data_parallel_rank, strategy.data_parallel_size),
        "mean": fabric.all_reduce(mine).item(),
        "sum": fabric.all_reduce(mine, reduce_op="sum").item(),
        "own group": fabric.all_reduce(
            torch.tensor(float(ctx.rank)), group=pair, reduce_op="sum"
        ).item(),
        "gathered": gathered,
        "broadcast": fabric.broadcast(f"from {ctx.rank}", src=2),
        "all": strategy.reduce_boolean_decision(ctx.rank != 1, all=True),
        "any": strategy.reduce_boolean_decision(ctx.rank == 1, all=False),
        "barrier": fabric.barrier(),
    }


def _reductions_on_a_card(ctx: Context) -> Any:
    """Metrics of ranks that share a card are reduced on the host."""
    with staged(FakeLane()) as lane:
        found = _reductions(ctx)
    assert found == _reductions(ctx)
    assert lane.copies == 0
    return found["sum"]


def _loaders(ctx: Context) -> dict[str, Any]:
    fabric = make_fabric(ctx, 1, 2)
    place = fabric.strategy.distributed_sampler_kwargs
    rows = fabric.setup_dataloaders(DataLoader(list(range(8)), batch_size=2, shuffle=True))
    seen = [int(row) for batch in rows for row in batch]
    model = fabric.setup_module(tiny_model("llama"))
    modes = [fabric.strategy.runtime.model_of(model.module).guard.mode]
    fabric.setup_dataloaders(DataLoader(Stream()))
    modes.append(fabric.strategy.runtime.model_of(model.module).guard.mode)
    # Every rank reads another batch; the first rank's is computed on by all.
    batch = batches(1, seed=ctx.rank)[0]
    batch.pop("labels")
    logits = model(**batch).logits
    return {"place": place, "seen": seen, "modes": modes, "logits": logits}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return world(4, _reductions, _reductions_on_a_card, _loaders)


def test_metrics_are_reduced_for_ranks_on_a_card(runs: dict[str, list[Any]]) -> None:
    assert good(runs["reductions_on_a_card"]) == [3.0] * 4


def test_metrics_are_reduced_over_replicas(runs: dict[str, list[Any]]) -> None:
    ranks = good(runs["reductions"])
    assert [rank["place"] for rank in ranks] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    for number, rank in enumerate(ranks):
        assert rank["mean"] == 1.5
        assert rank["sum"] == 3.0
        assert rank["own group"] == (0 + 2 if number in (0, 2) else 1 + 3)
        assert rank["gathered"] == [0, 1, 2, 3]
        assert rank["broadcast"] == "from 2"
        assert rank["all"] is False
        assert rank["any"] is True


def test_a_replica_reads_the_same_rows_on_all_its_ranks(runs: dict[str, list[Any]]) -> None:
    ranks = good(runs["loaders"])
    assert [rank["place"]["rank"] for rank in ranks] == [0, 1, 0, 1]
    assert ranks[0]["seen"] == ranks[2]["seen"]
    assert ranks[1]["seen"] == ranks[3]["seen"]
    assert sorted(ranks[0]["seen"] + ranks[1]["seen"]) == list(range(8))


def test_a_stream_is_read_by_the_first_rank_of_a_replica(runs: dict[str, list[Any]]) -> None:
    ranks = good(runs["loaders"])
    for number, rank in enumerate(ranks):
        assert rank["modes"] == ["check", "broadcast"]
        batch = batches(1, seed=number % 2)[0]
        batch.pop("labels")
        with torch.no_grad():
            alone = tiny_model("llama")(**batch).logits
        torch.testing.assert_close(rank["logits"].double(), alone, rtol=1e-6, atol=1e-6)


@contextmanager
def fresh_logging() -> Iterator[None]:
    """The package's logger and the root's handlers, as Python starts with them."""
    fresh = {"handlers": [], "level": logging.NOTSET, "propagate": True, "_cache": {}}
    with (
        patch.dict(vars(LOGGER), fresh),
        patch.dict(vars(logging.getLogger()), {"handlers": [], "_cache": {}}),
    ):
        yield


def test_messages_are_seen_without_any_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_logging():
        show_messages()
        show_messages()
        LOGGER.info("decided")
    assert capsys.readouterr().err == "decided\n"


def test_who_has_set_up_logging_decides_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with fresh_logging():
        LOGGER.level = logging.WARNING
        logging.getLogger().addHandler(logging.NullHandler())
        show_messages()
        LOGGER.info("decided")
        assert (LOGGER.handlers, LOGGER.level) == ([], logging.WARNING)
    assert capsys.readouterr().err == ""
