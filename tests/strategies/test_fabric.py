"""The loop of a Fabric user, unchanged, against the same loop in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from goose_strategy import Goose3DFabricStrategy
from goose_strategy.runtime.model import ShardedModel
from tests.harness.compare import (
    assert_close_named,
    assert_close_numbers,
    reference_run,
    token_loss,
)
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.parity.grid import assemble
from tests.strategies.ranks import good, make_fabric, pieces, same_error, unwrapped, world

STEPS = 4
# Fabric rounds what a module returns to fp32, also under 64-true; gradients are exact.
LOSS = 1e-7
NORM, PARAMETER = 1e-10, 1e-9


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})


def handle(fabric: Fabric, model: nn.Module) -> ShardedModel:
    found = fabric.strategy.runtime.model_of(unwrapped(model))
    assert found is not None
    return found


def mine(fabric: Fabric, number: int = STEPS) -> list[dict[str, Tensor]]:
    place = fabric.strategy.distributed_sampler_kwargs
    return [rows_of(b, place["rank"], place["num_replicas"]) for b in batches(number)]


def result(fabric: Fabric, model: nn.Module, losses: list[Tensor], **more: Any) -> dict[str, Any]:
    return {
        "losses": [loss.item() for loss in losses],
        "parameters": pieces(handle(fabric, model)),
        **more,
    }


# -- the three places where people write zero_grad ----------------------------------------------


def _run(ctx: Context, step: Callable[..., Tensor], **sizes: Any) -> dict[str, Any]:
    fabric = make_fabric(ctx, **{"tp": 2, "pp": 2, **sizes})
    model = tiny_model("llama")
    model, optimizer = fabric.setup(model, adamw(model))
    losses = [step(fabric, model, optimizer, batch) for batch in mine(fabric)]
    return result(fabric, model, losses)


def _zero_grad_before_the_forward(ctx: Context) -> dict[str, Any]:
    def step(fabric: Fabric, model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        return loss

    return _run(ctx, step)


def _zero_grad_before_the_backward(ctx: Context) -> dict[str, Any]:
    def step(fabric: Fabric, model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        return loss

    return _run(ctx, step, schedule="GPipe")


def _zero_grad_after_the_step(ctx: Context) -> dict[str, Any]:
    def step(fabric: Fabric, model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return _run(ctx, step)


def _two_losses_in_one_backward(ctx: Context) -> dict[str, Any]:
    """Half of the loss twice, as preference losses add up several calls."""

    def step(fabric: Fabric, model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        first, second = model(**batch).loss, model(**batch).loss
        model(**batch)  # a call that nobody uses
        fabric.backward(0.25 * first + 0.75 * second)
        optimizer.step()
        return first

    return _run(ctx, step)


def _clipped(ctx: Context) -> dict[str, Any]:
    fabric = make_fabric(ctx, 2, 2)
    model = tiny_model("llama")
    model, optimizer = fabric.setup(model, adamw(model))
    losses, norms = [], []
    for batch in mine(fabric):
        losses.append(model(**batch).loss)
        fabric.backward(losses[-1])
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return result(fabric, model, losses, norms=norms)


def _accumulated(ctx: Context) -> dict[str, Any]:
    fabric = make_fabric(ctx, 1, 2)  # dp2: there is something not to synchronize
    model = tiny_model("llama")
    model, optimizer = fabric.setup(model, adamw(model))
    losses = []
    for index, batch in enumerate(mine(fabric)):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            losses.append(model(**batch).loss)
            fabric.backward(losses[-1] / 2)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    return result(fabric, model, losses)


def _a_forward_and_its_backward_disagree_on_sync(ctx: Context) -> None:
    fabric = make_fabric(ctx, 1, 2)
    model = tiny_model("llama")
    model, _ = fabric.setup(model, adamw(model))
    with fabric.no_backward_sync(model):
        loss = model(**mine(fabric)[0]).loss
    fabric.backward(loss)


ORDERS = (
    _zero_grad_before_the_forward,
    _zero_grad_before_the_backward,
    _zero_grad_after_the_step,
    _two_losses_in_one_backward,
)


@pytest.fixture(scope="module")
def loops() -> dict[str, list[Any]]:
    return world(4, *ORDERS, _clipped, _accumulated, _a_forward_and_its_backward_disagree_on_sync)


@cache
def one_process() -> Any:
    return reference_run(tiny_model("llama"), batches(STEPS))


@pytest.mark.parametrize("order", [function.__name__.strip("_") for function in ORDERS])
def test_zero_grad_may_stand_anywhere(loops: dict[str, list[Any]], order: str) -> None:
    ranks, reference = good(loops[order]), one_process()
    for rank in ranks:
        assert_close_numbers(rank["losses"], reference.losses, LOSS)
    parameters = assemble([rank["parameters"] for rank in ranks], order)
    assert_close_named(parameters, reference.parameters, PARAMETER)


def test_clipping_is_by_the_norm_of_the_whole_model(loops: dict[str, list[Any]]) -> None:
    reference = reference_run(tiny_model("llama"), batches(STEPS), max_norm=0.5)
    ranks = good(loops["clipped"])
    for rank in ranks:
        assert_close_numbers(rank["norms"], reference.norms, NORM)
        assert_close_numbers(rank["losses"], reference.losses, LOSS)
    parameters = assemble([rank["parameters"] for rank in ranks], "clipped")
    assert_close_named(parameters, reference.parameters, PARAMETER)


def test_accumulation_without_sync_is_the_mean_of_the_calls(loops: dict[str, list[Any]]) -> None:
    reference = reference_run(tiny_model("llama"), batches(STEPS), accumulate=2)
    ranks = good(loops["accumulated"])
    for rank in ranks:
        assert_close_numbers(rank["losses"], reference.losses, LOSS)
    parameters = assemble([rank["parameters"] for rank in ranks], "accumulated")
    assert_close_named(parameters, reference.parameters, PARAMETER)


def test_the_sync_setting_of_forward_and_backward_must_agree(loops: dict[str, list[Any]]) -> None:
    results = loops["a_forward_and_its_backward_disagree_on_sync"]
    same_error(results, "RuntimeError", "without gradient sync and its backward with")


# -- optimizers, groups, schedulers -------------------------------------------------------------


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Decay for matrices only, as everybody writes it."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def train(
    model: Any, optimizer: Any, scheduler: Any, data: Any, backward: Any, loss_of: Any
) -> list[Tensor]:
    losses = []
    for batch in data:
        losses.append(loss_of(model, batch))
        backward(losses[-1])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def model_loss(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _a_scheduler_made_before_setup(ctx: Context) -> dict[str, Any]:
    fabric = make_fabric(ctx, 2, 2)
    model = tiny_model("llama")
    optimizer = AdamW(groups(model), lr=1e-2)
    scheduler = StepLR(optimizer, 2, 0.1)
    model, optimizer = fabric.setup(model, optimizer)
    losses = train(model, optimizer, scheduler, mine(fabric), fabric.backward, model_loss)
    return result(fabric, model, losses)


def _a_scheduler_made_after_setup(ctx: Context) -> dict[str, Any]:
    fabric = make_fabric(ctx, 2, 2)
    model = tiny_model("llama")
    model, optimizer = fabric.setup(model, AdamW(groups(model), lr=1e-2))
    scheduler = StepLR(optimizer, 2, 0.1)
    losses = train(model, optimizer, scheduler, mine(fabric), fabric.backward, model_loss)
    return result(fabric, model, losses)


def _a_scheduler_given_to_setup(ctx: Context) -> dict[str, Any]:
    fabric = make_fabric(ctx, 2, 2)
    model = tiny_model("llama")
    optimizer = AdamW(groups(model), lr=1e-2)
    model, optimizer, scheduler = fabric.setup(
        model, optimizer, scheduler=StepLR(optimizer, 2, 0.1)
    )
    losses = train(model, optimizer, scheduler, mine(fabric), fabric.backward, model_loss)
    return result(fabric, model, losses)


def _an_optimizer_made_after_setup(ctx: Context) -> dict[str, Any]:
    fabric = make_fabric(ctx, 2, 2)
    model = fabric.setup_module(tiny_model("llama"))
    optimizer = fabric.setup_optimizers(AdamW(groups(model), lr=1e-2))
    scheduler = StepLR(optimizer, 2, 0.1)
    losses = train(model, optimizer, scheduler, mine(fabric), fabric.backward, model_loss)
    return result(fabric, model, losses)


def _two_optimizers(ctx: Context) -> dict[str, Any]:
    """One after the other: the first must not lose its momentum to the second."""
    fabric = make_fabric(ctx, 2, 2)
    model = fabric.setup_module(tiny_model("llama"))
    matrices, vectors = groups(model)
    first = fabric.setup_optimizers(SGD(matrices["params"], lr=1e-2, momentum=0.9))
    losses = []
    second: Any = None
    for index, batch in enumerate(mine(fabric)):
        if index == 2:
            second = fabric.setup_optimizers(SGD(vectors["params"], lr=1e-2, momentum=0.9))
        losses.append(model(**batch).loss)
        fabric.backward(losses[-1])
        first.step()
        first.zero_grad()
        if second is not None:
            second.step()
        model.zero_grad()
    return result(fabric, model, losses)


SCHEDULED = (
    _a_scheduler_made_before_setup,
    _a_scheduler_made_after_setup,
    _a_scheduler_given_to_setup,
    _an_optimizer_made_after_setup,
)


@pytest.fixture(scope="module")
def setups() -> dict[str, list[Any]]:
    return world(4, *SCHEDULED, _two_optimizers)


@pytest.mark.parametrize("way", [function.__name__.strip("_") for function in SCHEDULED])
def test_groups_and_schedulers_work_as_in_one_process(
    setups: dict[str, list[Any]], way: str
) -> None:
    model = tiny_model("llama")
    optimizer = AdamW(groups(model), lr=1e-2)
    scheduler = StepLR(optimizer, 2, 0.1)

    def loss_of(model: Any, batch: Any) -> Tensor:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        return token_loss(model(**inputs).logits, batch["labels"])

    losses = train(model, optimizer, scheduler, batches(STEPS), Tensor.backward, loss_of)
    ranks = good(setups[way])
    for rank in ranks:
        assert_close_numbers(rank["losses"], [loss.item() for loss in losses], LOSS)
    parameters = assemble([rank["parameters"] for rank in ranks], way)
    assert_close_named(parameters, dict(model.named_parameters()), PARAMETER)


def test_a_second_optimizer_leaves_the_first_its_state(setups: dict[str, list[Any]]) -> None:
    model = tiny_model("llama")
    matrices, vectors = groups(model)
    first = SGD(matrices["params"], lr=1e-2, momentum=0.9)
    second = SGD(vectors["params"], lr=1e-2, momentum=0.9)
    for index, batch in enumerate(batches(STEPS)):
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        token_loss(model(**inputs).logits, batch["labels"]).backward()
        first.step()
        if index >= 2:
            second.step()
        model.zero_grad()
    ranks = good(setups["two_optimizers"])
    parameters = assemble([rank["parameters"] for rank in ranks], "two optimizers")
    assert_close_named(parameters, dict(model.named_parameters()), PARAMETER)


# -- what is no loop ----------------------------------------------------------------------------


def test_the_repr_names_the_sizes_and_the_other_door() -> None:
    text = repr(Goose3DFabricStrategy(tp=2, pp=4))
    assert "tp=2, pp=4" in text
    assert "from goose_strategy import Goose3DStrategy" in text


def test_devices_are_unknown_before_fabric_sets_them() -> None:
    with pytest.raises(RuntimeError, match="pass the strategy to Fabric first"):
        _ = Goose3DFabricStrategy().root_device
