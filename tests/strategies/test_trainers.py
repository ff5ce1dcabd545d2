"""Several optimizers by hand; several Trainers, one after another, on one module."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.utils.data import DataLoader

from tests.harness.models import batches
from tests.harness.worker import Context
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.plain_loop import compare, loop, parameters, validation_loss
from tests.strategies.ranks import (
    Raised,
    attempt,
    good,
    same_error,
    world,
)

# -- more than one optimizer, by hand -----------------------------------------------------------


class Adversaries(pl.LightningModule):
    """Two networks and two optimizers that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker = torch.nn.Linear(4, 4)
        self.judge = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        (noise,) = batch
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(self.judge(self.maker(noise)).square().mean())
        self.clip_gradients(first, gradient_clip_val=0.1)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        loss = (self.judge(noise) - 1).square().mean() + self.judge(self.maker(noise)).mean()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        maker = torch.optim.SGD(self.maker.parameters(), lr=0.1, momentum=0.9)
        return [maker, AdamW(self.judge.parameters(), lr=0.01, fused=False)]


def _adversaries(ctx: Context) -> dict[str, dict[str, Tensor]]:
    results = {}
    for name in ("ddp_find_unused_parameters_true", "goose3d"):
        pl.seed_everything(3, verbose=False)
        module = Adversaries()
        data = torch.utils.data.TensorDataset(torch.randn(24, 4))
        trainer = make_trainer(
            ctx, strategy=name, precision="32-true", use_distributed_sampler=True
        )
        trainer.fit(module, DataLoader(data, batch_size=4))
        results[name] = {k: v.detach().clone() for k, v in module.state_dict().items()}
    return results


def _two_trainers_one_module(ctx: Context) -> dict[str, Any]:
    module, data = LanguageModel(), Data()
    make_trainer(ctx, 2, 1).fit(module, datamodule=data)
    again = make_trainer(ctx, 1, 1)
    loss = again.validate(module, datamodule=data, verbose=False)[0]["val_loss"]
    again.fit(module, datamodule=data)
    return {
        "loss": loss,
        "losses": module.losses,
        "parameters": parameters(again, module),
    }


def _two_trainers_one_module_in_stages(ctx: Context) -> Raised:
    module, data = LanguageModel(), Data()
    make_trainer(ctx, 1, 2).validate(module, datamodule=data, verbose=False)
    raised: Raised = attempt(partial(make_trainer(ctx, 1, 2).fit, module, datamodule=data))
    return raised


@pytest.fixture(scope="module")
def pairs() -> dict[str, list[Any]]:
    return world(2, _adversaries, _two_trainers_one_module, _two_trainers_one_module_in_stages)


def test_several_optimizers_by_hand_have_the_bits_of_ddp(pairs: dict[str, list[Any]]) -> None:
    for rank in good(pairs["adversaries"]):
        ddp, mine = rank["ddp_find_unused_parameters_true"], rank["goose3d"]
        assert ddp.keys() == mine.keys()
        assert all(torch.equal(ddp[name], mine[name]) for name in ddp)


def test_another_trainer_takes_the_module_over(pairs: dict[str, list[Any]]) -> None:
    first, model = loop(batches(4))
    expected = validation_loss(model)
    second, model = loop(batches(4), model=model)
    ranks = good(pairs["two_trainers_one_module"])
    compare(ranks, first + second, model)
    assert [rank["loss"] for rank in ranks] == pytest.approx([expected] * 2, rel=1e-6)


def test_stages_cannot_be_taken_over(pairs: dict[str, list[Any]]) -> None:
    results = pairs["two_trainers_one_module_in_stages"]
    same_error(results, "ConfigError", "LanguageModel was cut into pp=2 stages by another")
