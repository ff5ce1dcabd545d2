"""What else Fabric sets up: a LightningModule, a compiled model, a module under half precision."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.harness.compare import assert_close_numbers, reference_run
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.strategies.lightning_module import LanguageModel
from tests.strategies.ranks import Raised, advice_ignored, attempt, good, make_fabric, world

STEPS = 3


class Wrapped(LanguageModel):
    """A LightningModule with a method of its own that calls the model."""

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def rate(self, batch: Any) -> Tensor:
        return self(**batch)


def _a_lightning_module(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": []}
    fabric = make_fabric(ctx, 2, 2)
    module = Wrapped()
    model, optimizer = fabric.setup(module, AdamW(module.parameters(), lr=1e-2, weight_decay=0.1))
    calls = (
        lambda batch: model.training_step(batch, 0),
        lambda batch: model(**batch),
        lambda batch: model.rate(batch),
    )
    for call, batch in zip(calls, batches(STEPS), strict=True):
        loss = call(batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
    found["attributes"] = (model.model.config.vocab_size, model.training, type(model.module))
    return found


def _compiled(ctx: Context, tp: int, pp: int) -> list[float]:
    fabric = make_fabric(ctx, tp, pp)
    plain = tiny_model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(plain, backend="eager")
    model, optimizer = fabric.setup(compiled, AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1))
    place = fabric.strategy.distributed_sampler_kwargs
    losses = []
    with advice_ignored():
        for batch in batches(STEPS):
            loss = model(**rows_of(batch, place["rank"], place["num_replicas"])).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def _a_compiled_model_in_stages(ctx: Context) -> list[float]:
    return _compiled(ctx, 1, 2)


def _a_compiled_model_in_slices(ctx: Context) -> list[float]:
    return _compiled(ctx, 2, 1)


def _a_plain_backward(ctx: Context) -> Raised:
    """Without fabric.backward nothing would be reduced, so Lightning refuses it."""
    fabric = make_fabric(ctx, 1, 2)
    model = fabric.setup(tiny_model("llama"))
    raised: Raised = attempt(model(**batches(1)[0]).loss.backward)
    return raised


def _half_precision(ctx: Context) -> dict[str, Any]:
    """Buffers stay wide, weights and outputs are what Fabric promises, any module trains."""
    fabric = make_fabric(ctx, 1, 1, precision="bf16-true")
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    model, optimizer = fabric.setup(net, AdamW(net.parameters(), lr=1e-2))
    losses = []
    for _ in range(8):
        loss = (model(torch.ones(2, 4)) - 3.0).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    lm = fabric.setup_module(tiny_model("llama", dtype=torch.float32))
    return {
        "losses": losses,
        "weights": {p.dtype for p in net.parameters()},
        "output": model(torch.ones(2, 4)).dtype,
        "rotary": lm.module.model.rotary_emb.inv_freq.dtype,
        "groups": [p.dtype for p in optimizer.param_groups[0]["params"]],
    }


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return world(
        4,
        _a_lightning_module,
        _a_compiled_model_in_stages,
        _a_compiled_model_in_slices,
        _a_plain_backward,
        _half_precision,
    )


def test_a_lightning_module_trains_in_fabric(runs: dict[str, list[Any]]) -> None:
    expected = reference_run(tiny_model("llama"), batches(STEPS)).losses
    for rank in good(runs["a_lightning_module"]):
        assert_close_numbers(rank["losses"], expected, 1e-7)
        assert rank["attributes"] == (97, True, Wrapped)


@pytest.mark.parametrize("cut", ["stages", "slices"])
def test_a_compiled_model_trains_in_fabric(runs: dict[str, list[Any]], cut: str) -> None:
    expected = reference_run(tiny_model("llama"), batches(STEPS)).losses
    for losses in good(runs[f"a_compiled_model_in_{cut}"]):
        assert_close_numbers(losses, expected, 1e-7)


def test_a_plain_backward_is_refused(runs: dict[str, list[Any]]) -> None:
    for result in runs["a_plain_backward"]:
        assert isinstance(result, Raised)
        assert "fabric.backward" in result.message


def test_half_precision_trains_any_module(runs: dict[str, list[Any]]) -> None:
    for rank in good(runs["half_precision"]):
        assert rank["losses"][-1] < rank["losses"][0]
        assert rank["weights"] == {torch.bfloat16} == set(rank["groups"])
        assert rank["output"] == torch.float32
        assert rank["rotary"] == torch.float32
