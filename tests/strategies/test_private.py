"""Private training through both doors: draws, epsilon, checkpoints, the monitor, refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.fabric import Fabric
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from goose_strategy import (
    Goose3DFabricStrategy,
    Goose3DStrategy,
    PipelineConfig,
    PrivacyConfig,
    PrivacyMonitor,
)
from goose_strategy.errors import ConfigError
from goose_strategy.strategies.private import private_loader, refuse_precision
from tests.harness.models import Batch, tiny_model
from tests.harness.worker import Context
from tests.strategies.ranks import advice_ignored, attempt, good, same_error, world

SIZE, LOGICAL, DELTA = 40, 8, 1e-5
PRIVACY = PrivacyConfig(
    max_grad_norm=1.0, noise_multiplier=1.1, logical_batch_size=LOGICAL, target_delta=DELTA
)


class Rows(Dataset[Batch]):
    """Rows that tell their number by their first token."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 97, (12,), generator=generator)
        ids[0] = 3 + number
        return {"input_ids": ids, "labels": ids}


def opacus_epsilon(steps: int, *, sigma: float = 1.1, kind: str = "prv") -> float:
    """Return what Opacus says of as many steps."""
    import warnings

    from opacus.accountants import create_accountant

    accountant = create_accountant(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(steps):
            accountant.step(noise_multiplier=sigma, sample_rate=LOGICAL / SIZE)
        return float(accountant.get_epsilon(DELTA))


def fabric_of(ctx: Context, privacy: PrivacyConfig = PRIVACY, **mesh: Any) -> Fabric:
    pipeline = PipelineConfig(num_microbatches=2, **mesh.pop("pipeline", {}))
    strategy = Goose3DFabricStrategy(**mesh, pipeline=pipeline, privacy=privacy)
    fabric = Fabric(accelerator="cpu", devices=ctx.world_size, strategy=strategy)
    fabric.launch()
    return fabric


def setup(fabric: Fabric) -> tuple[Any, Any]:
    model = tiny_model("llama", tied=True, dtype=torch.float32)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    return fabric.setup(model, optimizer)  # type: ignore[return-value]


def run(fabric: Fabric, model: Any, optimizer: Any, steps: int) -> list[list[int]]:
    """Train for some steps; return which samples this replica drew."""
    loader = fabric.setup_dataloaders(DataLoader(Rows(), batch_size=4, shuffle=True))
    drawn: list[list[int]] = []
    while len(drawn) < steps:
        for batch in loader:
            loss = model(**batch).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            real = batch["sample_mask"] > 0
            drawn.append((batch["input_ids"][real, 0] - 3).tolist())
            if len(drawn) == steps:
                break
    return drawn


# -- Fabric ---------------------------------------------------------------------------------------


def fabric_trains(ctx: Context) -> Any:
    fabric = fabric_of(ctx, tp=2, pp=1)
    model, optimizer = setup(fabric)
    drawn = run(fabric, model, optimizer, 4)
    ledger = fabric.strategy.privacy
    weights = [p.detach().clone() for p in model.parameters()]
    return drawn, ledger.epsilon(), ledger.epsilon(1e-3), ledger.steps, weights


def fabric_resumes(ctx: Context) -> Any:
    fabric = fabric_of(ctx, pp=2)
    model, optimizer = setup(fabric)
    run(fabric, model, optimizer, 2)
    path = fabric.broadcast(str(ctx.tmp_path / "checkpoint"))
    fabric.save(path, {"model": model, "optimizer": optimizer})
    before = fabric.strategy.privacy.epsilon()
    ledger = fabric.strategy.privacy
    first_noise = ledger.noise._root
    runs = (
        PRIVACY,
        replace(PRIVACY, noise_multiplier=0.9),
        replace(PRIVACY, max_grad_norm=2.0),
        replace(PRIVACY, logical_batch_size=4),
        replace(PRIVACY, noise_multiplier=0.9, allow_privacy_change=True),
        None,
    )
    return [before, *(attempt(partial(_resumed, ctx, path, one, first_noise)) for one in runs)]


def _resumed(ctx: Context, path: str, privacy: PrivacyConfig | None, root: bytes) -> Any:
    fabric = fabric_of(ctx, privacy, pp=2)  # type: ignore[arg-type]
    model, optimizer = setup(fabric)
    fabric.load(path, {"model": model, "optimizer": optimizer})
    assert fabric.strategy.privacy.noise._root != root, "the noise is drawn anew"
    run(fabric, model, optimizer, 1)
    return fabric.strategy.privacy.epsilon(), fabric.strategy.privacy.steps


def fabric_refuses(ctx: Context) -> Any:
    loaders = (
        DataLoader(Rows(), batch_size=4),
        DataLoader(Rows(), batch_size=4, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
        DataLoader(Stream(), batch_size=4),
    )
    acts = [*(partial(_one_batch, ctx, loader) for loader in loaders), partial(_clipped, ctx)]
    return [attempt(act) for act in acts]


def _one_batch(ctx: Context, loader: Any) -> None:
    fabric = fabric_of(ctx)
    model, _ = setup(fabric)
    for batch in fabric.setup_dataloaders(loader):
        model(**batch)
        return


def _clipped(ctx: Context) -> None:
    fabric = fabric_of(ctx)
    model, optimizer = setup(fabric)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)


class Stream(IterableDataset[Batch]):
    """Rows in a stream."""

    def __iter__(self) -> Any:
        return iter([Rows()[number] for number in range(8)])


# -- the Trainer ----------------------------------------------------------------------------------


class Module(pl.LightningModule):
    """Knows nothing of privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model("llama", tied=True, dtype=torch.float32)
        self.drawn: list[int] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.drawn.append(int((batch["sample_mask"] > 0).sum()))
        loss: Tensor = self.model(**batch).loss
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True, batch_size=4)

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=4)


def trainer_of(ctx: Context, privacy: PrivacyConfig = PRIVACY, **settings: Any) -> pl.Trainer:
    strategy = Goose3DStrategy(
        pp=2, pipeline=PipelineConfig(schedule="ZBH1", num_microbatches=2), privacy=privacy
    )
    defaults: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "max_steps": 3,
        "num_sanity_val_steps": 1,
        "limit_val_batches": 2,
        "val_check_interval": 3,
        "default_root_dir": ctx.tmp_path,
    }
    return pl.Trainer(
        accelerator="cpu", devices=ctx.world_size, strategy=strategy, **defaults | settings
    )


def trainer_fits(ctx: Context) -> Any:
    logger = CSVLogger(str(ctx.tmp_path), name="logs")
    trainer = trainer_of(
        ctx, logger=logger, callbacks=[PrivacyMonitor(every_n_steps=1, clipped=True)], max_steps=3
    )
    module = Module()
    with advice_ignored():
        trainer.fit(module)
    path = trainer.strategy.broadcast(str(ctx.tmp_path / "trained"))
    trainer.save_checkpoint(path)
    again = trainer_of(ctx, max_steps=5)
    with advice_ignored():
        again.fit(Module(), ckpt_path=path)
    shown = {k: float(v) for k, v in trainer.callback_metrics.items()}
    spent = trainer.strategy.privacy.epsilon(), again.strategy.privacy.epsilon()  # type: ignore[attr-defined]
    return module.drawn, shown, spent, again.strategy.privacy.steps  # type: ignore[attr-defined]


def trainer_refuses(ctx: Context) -> Any:
    refused: tuple[dict[str, Any], ...] = (
        {"gradient_clip_val": 1.0},
        {"accumulate_grad_batches": 2},
    )
    return [attempt(partial(_fit, ctx, settings)) for settings in refused]


def _fit(ctx: Context, settings: dict[str, Any]) -> None:
    with advice_ignored():
        trainer_of(ctx, **settings).fit(Module())


@cache
def in_a_world_of_two() -> dict[str, list[Any]]:
    return world(
        2,
        fabric_trains,
        fabric_resumes,
        fabric_refuses,
        trainer_fits,
        trainer_refuses,
        timeout_s=55.0,
    )


def test_fabric_draws_and_counts() -> None:
    for drawn, epsilon, at_other_delta, steps, _ in good(in_a_world_of_two()["fabric_trains"]):
        assert steps == 4
        assert epsilon == pytest.approx(opacus_epsilon(4), rel=1e-9)
        assert at_other_delta < epsilon
        assert all(len(set(one)) == len(one) for one in drawn), "a sample was drawn twice"
        assert len({len(one) for one in drawn}) > 1, "every draw had the same size"
    first, second = in_a_world_of_two()["fabric_trains"]
    assert first[0] == second[0], "two tp ranks drew other samples"


def test_a_resumed_run_counts_on_and_refuses_other_settings() -> None:
    for before, same, sigma, norm, size, allowed, plain in good(
        in_a_world_of_two()["fabric_resumes"]
    ):
        assert before == pytest.approx(opacus_epsilon(2), rel=1e-9)
        assert same == (pytest.approx(opacus_epsilon(3), rel=1e-9), 3), same
        for refused, text in ((sigma, "noise_mult"), (norm, "max_grad"), (size, "logical_batch")):
            assert refused.kind == "CheckpointError", refused
            assert text in refused.message
        assert allowed[1] == 3, allowed
        assert allowed[0] > same[0]
        assert plain.kind == "CheckpointError", plain
        assert "privacy=None" in plain.message


def test_fabric_refuses_batches_that_were_not_drawn() -> None:
    for unshuffled, weighted, stream, clipped in good(in_a_world_of_two()["fabric_refuses"]):
        for refused in (unshuffled, weighted, stream):
            assert refused.kind == "PrivacyError", refused
            assert "carries no sample_mask" in refused.message
        assert clipped.kind == "ConfigError"
        assert "gradient_clip_val" in clipped.message


def test_the_trainer_draws_counts_and_logs() -> None:
    for drawn, shown, (first, second), steps in good(in_a_world_of_two()["trainer_fits"]):
        assert len(drawn) == 3
        assert first == pytest.approx(opacus_epsilon(3), rel=1e-9)
        assert second == pytest.approx(opacus_epsilon(5), rel=1e-9)
        assert steps == 5
        assert shown["privacy/epsilon"] == pytest.approx(first, rel=1e-5)
        assert 0 <= shown["privacy/clipped (not private)"] <= 1
        assert "val_loss" in shown


def test_the_trainer_refuses_what_breaks_the_promise() -> None:
    results = in_a_world_of_two()["trainer_refuses"]
    for number, text in enumerate(("gradient_clip_val=1.0", "accumulate_grad_batches=2")):
        same_error([rank[number] for rank in good(results)], "ConfigError", text)


# -- without a world ------------------------------------------------------------------------------


def test_the_command_line_knows_every_setting() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=Goose3DStrategy)
    parsed = parser.parse_args(
        [
            "--strategy=goose_strategy.strategies.pytorch.Goose3DStrategy",
            "--strategy.privacy.noise_multiplier=0.8",
            "--strategy.privacy.max_grad_norm=0.5",
            "--strategy.privacy.clipping=automatic",
        ]
    )
    strategy = parser.instantiate(parsed).strategy
    privacy = strategy._door.config.privacy
    assert privacy == PrivacyConfig(noise_multiplier=0.8, max_grad_norm=0.5, clipping="automatic")


@pytest.mark.parametrize("door", [Goose3DStrategy, Goose3DFabricStrategy])
def test_a_strategy_without_privacy_says_so(door: Any) -> None:
    with pytest.raises(ConfigError, match="privacy=None"):
        _ = door().privacy


def test_precisions_with_a_scaler_are_refused() -> None:
    class Plugin:
        precision = "16-mixed"

    with pytest.raises(ConfigError, match="depends on the data"):
        refuse_precision(Plugin())
    Plugin.precision = "bf16-mixed"
    refuse_precision(Plugin())


def test_loaders_are_left_alone_without_privacy() -> None:
    class Runtime:
        ledger = None

    loader = DataLoader(Rows(), shuffle=True)
    assert private_loader(Runtime(), loader) is loader  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"delta": 0.0}, {"delta": 1.0}, {"every_n_steps": 0}])
def test_the_monitor_refuses_wrong_numbers(settings: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PrivacyMonitor(**settings)
