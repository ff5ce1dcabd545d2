"""What a run may do to its loop, loaders and checkpoints without spending more than it says.

Each scenario is what a user does without a thought: a loader made anew, a batch left out, a second
fit, a way back to a checkpoint.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader

from goose_strategy.privacy.noise import Noise
from tests.harness.models import Batch, tiny_model
from tests.harness.worker import Context
from tests.strategies.ranks import advice_ignored, attempt, good, same_error, world
from tests.strategies.test_private import (
    Module,
    Rows,
    fabric_of,
    opacus_epsilon,
    run,
    setup,
    trainer_of,
)


def goes_back(ctx: Context) -> Any:
    """Return to a checkpoint of the same run; which noise was used, and what was spent."""
    fabric = fabric_of(ctx)
    model, optimizer = setup(fabric)
    used: list[tuple[str, int, int]] = []
    add = Noise.add

    def noted(self: Noise, target: Tensor, scale: float, **key: Any) -> None:
        used.append((key["name"], key["step"], key["start"]))
        add(self, target, scale, **key)

    with patch.object(Noise, "add", noted):
        run(fabric, model, optimizer, 2)
        path = fabric.broadcast(str(ctx.tmp_path / "back"))
        fabric.save(path, {"model": model, "optimizer": optimizer})
        run(fabric, model, optimizer, 2)
        fabric.load(path, {"model": model, "optimizer": optimizer})
        run(fabric, model, optimizer, 1)
    ledger = fabric.strategy.privacy
    return len(used) - len(set(used)), len(used), ledger.steps, ledger.epsilon()


def makes_a_loader_anew(ctx: Context) -> Any:
    """Take a batch of two loaders after one another; then of the first again."""
    fabric = fabric_of(ctx)
    model, optimizer = setup(fabric)
    loaders = [
        iter(fabric.setup_dataloaders(DataLoader(Rows(), batch_size=4, shuffle=True)))
        for _ in range(2)
    ]
    drawn, marks = [], []
    for loader in (loaders[0], loaders[1]):
        for _ in range(2):
            batch = next(loader)
            real = batch["sample_mask"] > 0
            drawn.append((batch["input_ids"][real, 0] - 3).tolist())
            marks.append(int(batch["sample_mask"].max()))
            fabric.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    again = attempt(lambda: model(**next(loaders[0])))
    return drawn, marks, again, fabric.strategy.privacy.epsilon()


def leaves_things_out(ctx: Context) -> Any:
    acts = (_no_step, _no_sync, _no_backward, _left_out_of_the_optimizer, _watched, *_REPEATS)
    return [attempt(partial(act, ctx)) for act in acts]


def _one(ctx: Context) -> tuple[Any, Any, Any, Any]:
    fabric = fabric_of(ctx)
    model, optimizer = setup(fabric)
    loader = fabric.setup_dataloaders(DataLoader(Rows(), batch_size=4, shuffle=True))
    return fabric, model, optimizer, loader


def _no_step(ctx: Context) -> None:
    fabric, model, _, loader = _one(ctx)
    for batch in loader:
        fabric.backward(model(**batch).loss)
        model.zero_grad()


def _no_sync(ctx: Context) -> None:
    fabric, model, _, loader = _one(ctx)
    for batch in loader:
        with fabric.no_backward_sync(model):
            fabric.backward(model(**batch).loss)


def _no_backward(ctx: Context) -> None:
    _, model, _, loader = _one(ctx)
    for batch in loader:
        loss = model(**batch).loss
        if loss > 0:  # As ``if not loss.isfinite(): continue`` would.
            continue


def _left_out_of_the_optimizer(ctx: Context) -> None:
    model = tiny_model("llama", tied=True, dtype=torch.float32)
    fabric_of(ctx).setup(model, SGD(list(model.parameters())[3:], lr=0.1))


def _two_draws(ctx: Context) -> None:
    _, model, _, loader = _one(ctx)
    model([batch for batch, _ in zip(loader, range(2), strict=False)])


def _every_row_twice(ctx: Context) -> None:
    _, model, _, loader = _one(ctx)
    for batch in loader:
        model(**{name: torch.cat([value, value]) for name, value in batch.items()})


_REPEATS = (_two_draws, _every_row_twice)


def _watched(ctx: Context) -> None:
    fabric, model, _, loader = _one(ctx)
    model.lm_head.weight.register_hook(lambda gradient: gradient * 2)
    for batch in loader:
        fabric.backward(model(**batch).loss)


# -- the Trainer ----------------------------------------------------------------------------------


class Reader(Module):
    """Notes the marks of its batches, and may leave one out."""

    def __init__(self, *, without: int = -1) -> None:
        super().__init__()
        self.marks: list[int] = []
        self.without = without

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.marks.append(int(batch["sample_mask"].max()))
        if batch_idx == self.without:
            return None
        return super().training_step(batch, batch_idx)


class Unaware(Module):
    """Does not look for marks."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


def trainer_makes_loaders_anew(ctx: Context) -> Any:
    settings = {"max_steps": -1, "limit_train_batches": 2, "val_check_interval": 1.0}
    trainer = trainer_of(
        ctx, max_epochs=2, reload_dataloaders_every_n_epochs=1, limit_val_batches=0, **settings
    )
    module = Reader()
    with advice_ignored():
        trainer.fit(module)
        first = trainer.strategy.privacy.steps  # type: ignore[attr-defined]
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module)
    ledger = trainer.strategy.privacy  # type: ignore[attr-defined]
    return module.marks, first, ledger.steps, ledger.epsilon()


def trainer_leaves_things_out(ctx: Context) -> Any:
    return [
        attempt(partial(_fit, ctx, Reader(without=1), {})),
        attempt(partial(_fit, ctx, Unaware(), {"overfit_batches": 2, "val_check_interval": 1.0})),
    ]


def _fit(ctx: Context, module: Module, settings: dict[str, Any]) -> None:
    with advice_ignored():
        trainer_of(ctx, limit_val_batches=0, **settings).fit(module)


@cache
def in_a_world_of_two() -> dict[str, list[Any]]:
    return world(
        2,
        goes_back,
        makes_a_loader_anew,
        leaves_things_out,
        trainer_makes_loaders_anew,
        trainer_leaves_things_out,
        timeout_s=55.0,
    )


def test_a_way_back_repeats_no_noise_and_forgets_no_step() -> None:
    for repeated, used, steps, epsilon in good(in_a_world_of_two()["goes_back"]):
        assert used > 0
        assert repeated == 0
        assert steps == 5
        assert epsilon == pytest.approx(opacus_epsilon(5), rel=1e-9)


def test_loaders_that_are_made_anew_draw_anew() -> None:
    for drawn, marks, again, epsilon in good(in_a_world_of_two()["makes_a_loader_anew"]):
        known = [mark for mark in marks if mark]
        assert known == sorted(set(known)), "two batches were one draw"
        assert drawn[0] != drawn[2] or drawn[1] != drawn[3], "both loaders drew the same samples"
        assert again.kind == "PrivacyError", again
        assert "set up earlier" in again.message
        assert epsilon == pytest.approx(opacus_epsilon(4), rel=1e-9)


def test_what_leaves_a_step_out_is_refused() -> None:
    found = good(in_a_world_of_two()["leaves_things_out"])
    refused = (
        ("PrivacyError", "wait for their step"),
        ("PrivacyError", "cannot be accumulated"),
        ("PrivacyError", "no step followed"),
        ("ConfigError", "in no group"),
        ("PrivacyError", "lm_head.weight has a hook|embed_tokens.weight has a hook"),
        ("PrivacyError", r"rows of the draws \[1, 2\]"),
        ("PrivacyError", "some were repeated"),
    )
    for number, (kind, text) in enumerate(refused):
        same_error([rank[number] for rank in found], kind, text)


def test_the_trainer_draws_anew_in_every_loader_and_fit() -> None:
    for marks, first, steps, epsilon in good(in_a_world_of_two()["trainer_makes_loaders_anew"]):
        assert (first, steps) == (4, 6)
        known = [mark for mark in marks if mark]
        assert known == sorted(set(known)), "two batches were one draw"
        assert max(known) > 2**40, "no loader was made anew"
        assert epsilon == pytest.approx(opacus_epsilon(6), rel=1e-9)


def test_the_trainer_leaves_no_step_out() -> None:
    found = good(in_a_world_of_two()["trainer_leaves_things_out"])
    # Lightning itself leaves out no step where there are several ranks.
    same_error([rank[0] for rank in found], "RuntimeError", "by returning None")
    same_error([rank[1] for rank in found], "PrivacyError", "carries no sample_mask")
