"""What the Trainer offers and a shard cannot do is refused by name; so is the twin package."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner

from goose_strategy import Goose3DStrategy
from goose_strategy.errors import ConfigError
from goose_strategy.strategies.refusals import refuse_callbacks, refuse_twin_package
from tests.harness.worker import Context
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.ranks import Raised, advice_ignored, attempt, good, same_error, world


class Renamed(StochasticWeightAveraging):
    """A subclass is no better."""


REFUSED = [
    LearningRateFinder(),
    BatchSizeFinder(),
    StochasticWeightAveraging(swa_lrs=0.1),
    WeightAveraging(),
    EMAWeightAveraging(),
    Renamed(swa_lrs=0.1),
]


@pytest.mark.parametrize("callback", REFUSED, ids=lambda callback: type(callback).__name__)
def test_callbacks_are_refused_by_name(callback: Any) -> None:
    trainer = pl.Trainer(logger=False, accelerator="cpu", devices=1, enable_checkpointing=False)
    trainer.callbacks.append(callback)
    with pytest.raises(ConfigError, match=r"callback .* does not work with strategy='goose3d': "):
        refuse_callbacks(trainer)


def test_other_callbacks_are_welcome() -> None:
    trainer = pl.Trainer(
        logger=False, accelerator="cpu", devices=1, callbacks=[LearningRateMonitor()]
    )
    refuse_callbacks(trainer)


def twin_module() -> Any:
    """Make an instance of a class as pytorch_lightning's own, without importing that."""
    base = type("LightningModule", (), {"__module__": "pytorch_lightning.core.module"})
    return type("Mine", (base,), {})()


def test_a_module_of_the_twin_package_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"Mine derives from pytorch_lightning\.LightningModule"):
        refuse_twin_package(twin_module())
    with pytest.raises(ConfigError, match=r"lightning\.pytorch"):
        Goose3DStrategy().connect(twin_module())
    refuse_twin_package(LanguageModel())


# -- through the Trainer ------------------------------------------------------------------------


def _swa(ctx: Context) -> Raised:
    trainer = make_trainer(ctx, 1, 2, callbacks=[StochasticWeightAveraging(swa_lrs=0.1)])
    raised: Raised = attempt(partial(trainer.fit, LanguageModel(), datamodule=Data()))
    return raised


def _lr_find(ctx: Context) -> Raised:
    trainer = make_trainer(ctx, 1, 2)
    raised: Raised = attempt(
        partial(Tuner(trainer).lr_find, LanguageModel(), datamodule=Data(), num_training=2)
    )
    return raised


def _scale_batch_size(ctx: Context) -> Raised:
    with advice_ignored():
        trainer = make_trainer(ctx, 1, 2, callbacks=[BatchSizeFinder()])
        raised: Raised = attempt(partial(trainer.fit, LanguageModel(), datamodule=Data()))
    return raised


def _compiled(ctx: Context) -> Raised:
    trainer = make_trainer(ctx, 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's compiler on itself
        module = torch.compile(LanguageModel())
    raised: Raised = attempt(partial(trainer.fit, module, datamodule=Data()))
    return raised


def _twin(ctx: Context) -> tuple[Raised, Raised, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pytorch_lightning as twin
        from pytorch_lightning.demos.boring_classes import BoringModel

    class Theirs(BoringModel):  # type: ignore[misc]
        pass

    other_trainer = attempt(
        partial(twin.Trainer, accelerator="cpu", devices=2, strategy=Goose3DStrategy())
    )
    trainer = make_trainer(ctx, 1, 2)
    other_module = attempt(partial(trainer.fit, Theirs()))
    module = LanguageModel()  # its mere presence does no harm
    trainer.fit(module, datamodule=Data(1))
    return other_trainer, other_module, trainer.global_step


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return world(2, _swa, _lr_find, _scale_batch_size, _compiled, _twin)


@pytest.mark.parametrize(
    ("run", "name"), [("swa", "StochasticWeightAveraging"), ("lr_find", "LearningRateFinder")]
)
def test_fitting_with_them_is_refused(runs: dict[str, list[Any]], run: str, name: str) -> None:
    same_error(runs[run], "ConfigError", f"callback {name} does not work")


def test_lightning_itself_refuses_to_find_a_batch_size(runs: dict[str, list[Any]]) -> None:
    same_error(runs["scale_batch_size"], "MisconfigurationException", "Batch size finder is not")


def test_a_compiled_module_is_refused_by_name(runs: dict[str, list[Any]]) -> None:
    same_error(runs["compiled"], "RuntimeError", "compiled model.*strategy: `Goose3DStrategy`")


def test_the_twin_package_is_refused_and_its_presence_is_not(runs: dict[str, list[Any]]) -> None:
    for trainer, module, steps in good(runs["twin"]):
        same_error([trainer], "ValueError", r"not pytorch_lightning")
        # Lightning refuses it before a strategy sees it.
        same_error([module], "TypeError", "must be a `LightningModule`.*Theirs")
        assert steps == 1
