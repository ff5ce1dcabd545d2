"""The Trainer with an unmodified LightningModule, against a plain loop in one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW
from torch.utils.data import DataLoader

from goose_strategy import Goose3DStrategy
from tests.harness.compare import assert_close_numbers
from tests.harness.models import Batch, batches, tiny_model
from tests.harness.worker import Context
from tests.strategies.lightning_module import VALIDATE, Data, LanguageModel, make_trainer
from tests.strategies.plain_loop import (
    EXACT,
    compare,
    loop,
    parameters,
    validation_loss,
    whole_loss,
)
from tests.strategies.ranks import (
    advice_ignored,
    good,
    world,
)


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


# -- the whole life of a module -----------------------------------------------------------------


def _whole_life(ctx: Context) -> dict[str, Any]:
    checkpoints = ModelCheckpoint(
        ctx.tmp_path / "kept", monitor="val_loss", save_last=True, save_top_k=-1
    )
    rates = Rates()
    trainer = make_trainer(
        ctx,
        2,
        2,
        max_epochs=2,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
        logger=CSVLogger(ctx.tmp_path),
        callbacks=[rates, checkpoints, EarlyStopping("val_loss"), LearningRateMonitor("step")],
    )
    module, data = LanguageModel(), Data()
    trainer.fit(module, datamodule=data)
    after = parameters(trainer, module)
    logged = {k: float(v) for k, v in trainer.callback_metrics.items()}
    validated = trainer.validate(module, datamodule=data, verbose=False)
    tested = trainer.test(module, datamodule=data, verbose=False, ckpt_path="last")
    predicted = trainer.predict(module, datamodule=data)
    return {
        "losses": module.losses,
        "rates": rates.seen,
        "parameters": after,
        "logged": logged,
        "validated": validated[0]["val_loss"],
        "tested": tested[0]["test_loss"],
        "predicted": predicted,
        "best": checkpoints.best_model_path,
        "score": float(checkpoints.best_model_score or 0.0),
        "kept": sorted(path.name for path in (ctx.tmp_path / "kept").iterdir()),
    }


def _accumulated_and_clipped(ctx: Context) -> dict[str, Any]:
    trainer = make_trainer(ctx, 1, 2, accumulate_grad_batches=2, gradient_clip_val=0.5)
    module = LanguageModel()
    trainer.fit(module, datamodule=Data())
    return {"losses": module.losses, "parameters": parameters(trainer, module)}


def _clipped_by_value(ctx: Context) -> dict[str, Any]:
    trainer = make_trainer(
        ctx, 2, 2, gradient_clip_val=0.01, gradient_clip_algorithm="value", max_steps=2
    )
    module = LanguageModel()
    trainer.fit(module, datamodule=Data())
    return {"losses": module.losses, "parameters": parameters(trainer, module)}


def _validate_fit_fit(ctx: Context) -> dict[str, Any]:
    trainer = make_trainer(ctx, 2, 2)
    module, data = LanguageModel(), Data()
    before = trainer.validate(module, datamodule=data, verbose=False)[0]["val_loss"]
    trainer.fit(module, datamodule=data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, datamodule=data)
    return {
        "before": before,
        "losses": module.losses,
        "parameters": parameters(trainer, module),
        "models": len(trainer.strategy.runtime.models),  # type: ignore[attr-defined]
    }


class HeadOnly(LanguageModel):
    def configure_optimizers(self) -> Any:
        return AdamW(self.model.lm_head.parameters(), lr=1e-2)


def _an_optimizer_over_the_head_alone(ctx: Context) -> dict[str, Any]:
    trainer = make_trainer(ctx, 2, 2)
    module = HeadOnly()
    trainer.fit(module, datamodule=Data())
    names = [name for name, _ in module.named_parameters()]
    return {
        "losses": module.losses,
        "parameters": parameters(trainer, module),
        "placeholders": [name for name in names if "goose" in name],
    }


class NoOptimizer(LanguageModel):
    def configure_optimizers(self) -> None:
        return None


def _no_optimizer(ctx: Context) -> list[float]:
    module = NoOptimizer()
    trainer = make_trainer(ctx, 2, 2)
    with advice_ignored():
        trainer.fit(module, datamodule=Data(2))
    return module.losses


class Meshed(LanguageModel):
    def configure_model(self) -> None:
        mesh = self.device_mesh
        assert mesh is not None
        self.names = mesh.mesh_dim_names
        self.sizes = tuple(mesh.mesh.shape)
        self.group = mesh["data_parallel"].get_group().size()


def _the_device_mesh(ctx: Context) -> Any:
    module = Meshed()
    make_trainer(ctx, 1, 2).validate(module, datamodule=Data(), verbose=False)
    return module.names, module.sizes, module.group


class Rows(torch.utils.data.Dataset[Batch]):
    """Five rows: with two replicas, batches of different numbers of rows."""

    def __init__(self) -> None:
        whole = batches(1, batch_size=5)[0]
        self.rows = [{name: value[i] for name, value in whole.items()} for i in range(5)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.rows[index]


def _uneven_validation(ctx: Context) -> dict[str, Any]:
    trainer = make_trainer(ctx, 1, 2, use_distributed_sampler=True)
    module = LanguageModel()
    # Every row once: replicas predict on 3 and 2 rows, and validate on 3 each, one row twice.
    with advice_ignored():
        validated = trainer.validate(module, DataLoader(Rows(), batch_size=2), verbose=False)
    predicted = trainer.predict(module, DataLoader(Rows(), batch_size=1))
    assert predicted is not None
    place = trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
    return {
        "loss": validated[0]["val_loss"],
        "replica": place["rank"],
        "predicted": torch.cat([logits[:, 0] for logits in predicted]),  # type: ignore[call-overload]
    }


FITS = (
    _whole_life,
    _accumulated_and_clipped,
    _clipped_by_value,
    _validate_fit_fit,
    _an_optimizer_over_the_head_alone,
    _no_optimizer,
    _the_device_mesh,
    _uneven_validation,
)


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return world(4, *FITS)


def test_a_module_lives_its_whole_life(runs: dict[str, list[Any]]) -> None:
    losses, model = loop(batches(4) * 2)
    ranks = good(runs["whole_life"])
    compare(ranks, losses, model)
    expected = validation_loss(model)
    for rank in ranks:
        assert rank["validated"] == pytest.approx(expected, rel=1e-6)
        assert rank["logged"]["val_loss"] == pytest.approx(expected, rel=1e-6)
        assert rank["logged"]["train_loss"] == pytest.approx(losses[-1], rel=1e-6)
        assert rank["tested"] == pytest.approx(expected, rel=1e-6)


def test_schedulers_step_as_usual(runs: dict[str, list[Any]]) -> None:
    for rank in good(runs["whole_life"]):
        # Lightning steps them before the hook that has recorded.
        assert rank["rates"] == [1e-2, *(1e-2 / 2**n for n in (1, 1, 2, 2, 3, 3, 4))]


def test_checkpoints_follow_the_monitor_alike_on_all_ranks(runs: dict[str, list[Any]]) -> None:
    ranks = good(runs["whole_life"])
    assert len({rank["best"] for rank in ranks}) == 1
    assert len({rank["score"] for rank in ranks}) == 1
    assert ranks[0]["kept"] == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]


def test_every_rank_predicts_whole_logits(runs: dict[str, list[Any]]) -> None:
    _, model = loop(batches(4) * 2)
    with torch.no_grad():
        expected = [
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            for batch in batches(2, seed=VALIDATE)
        ]
    for rank in good(runs["whole_life"]):
        for mine, theirs in zip(rank["predicted"], expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-7)


def test_accumulation_and_clipping_are_those_of_one_process(runs: dict[str, list[Any]]) -> None:
    compare(good(runs["accumulated_and_clipped"]), *loop(batches(4), accumulate=2, norm=0.5))


def test_clipping_by_value_is_that_of_one_process(runs: dict[str, list[Any]]) -> None:
    compare(good(runs["clipped_by_value"]), *loop(batches(4)[:2], value=0.01))


def test_a_module_is_validated_and_fitted_twice(runs: dict[str, list[Any]]) -> None:
    first, model = loop(batches(4))
    second, model = loop(batches(4), model=model)
    ranks = good(runs["validate_fit_fit"])
    compare(ranks, first + second, model)
    for rank in ranks:
        assert rank["before"] == pytest.approx(validation_loss(tiny_model("llama")), rel=1e-6)
        assert rank["models"] == 1


def test_an_optimizer_may_hold_the_head_alone(runs: dict[str, list[Any]]) -> None:
    ranks = good(runs["an_optimizer_over_the_head_alone"])
    compare(ranks, *loop(batches(4), only="lm_head"))
    assert all(rank["placeholders"] == [] for rank in ranks)


def test_a_module_may_have_no_optimizer(runs: dict[str, list[Any]]) -> None:
    expected = [whole_loss(tiny_model("llama"), batch).item() for batch in batches(2)]
    for losses in good(runs["no_optimizer"]):
        assert_close_numbers(losses, expected, EXACT)


def test_the_device_mesh_is_the_modules(runs: dict[str, list[Any]]) -> None:
    names = ("pipeline_parallel", "data_parallel", "tensor_parallel")
    assert good(runs["the_device_mesh"]) == [(names, (2, 2, 1), 2)] * 4


def test_replicas_may_have_different_numbers_of_batches(runs: dict[str, list[Any]]) -> None:
    ranks = good(runs["uneven_validation"])
    assert len({rank["loss"] for rank in ranks}) == 1
    rows = {rank["replica"]: len(rank["predicted"]) for rank in ranks}
    assert rows == {0: 3, 1: 2}


# -- the surface --------------------------------------------------------------------------------


def test_the_repr_names_the_sizes_and_the_other_door() -> None:
    text = repr(Goose3DStrategy(tp=2, pp=4))
    assert "tp=2, pp=4" in text
    assert "from goose_strategy import Goose3DFabricStrategy" in text
    assert "not pytorch_lightning" in text


def test_nothing_is_known_before_the_trainer_sets_it() -> None:
    strategy = Goose3DStrategy()
    with pytest.raises(RuntimeError, match="pass the strategy to Trainer first"):
        _ = strategy.root_device
    with pytest.raises(RuntimeError, match="No LightningModule is connected"):
        strategy.on_validation_start()
