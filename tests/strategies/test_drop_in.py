"""The bare name in ddp's place: the same bits for any module, or the reason why not.

Both strategies average gradients over replicas; for two replicas the factor is a power of two, so
it rounds nothing wherever it is applied, and the sum of two numbers has one order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context, seed_everything
from tests.strategies.ranks import good, world

STEPS = 5


class Net(nn.Module):
    """Batch norm has buffers; one layer is never used, one only on even steps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 33), nn.BatchNorm1d(33), nn.ReLU())
        self.sometimes = nn.Linear(33, 33)
        self.never = nn.Linear(33, 5)
        self.head = nn.Linear(33, 3)

    def forward(self, x: Tensor, use: Tensor) -> Tensor:
        hidden = self.body(x)
        if bool(use):
            hidden = hidden + self.sometimes(hidden)
        out: Tensor = self.head(hidden)
        return out


def start(ctx: Context, name: str) -> Fabric:
    strategy: Any = DDPStrategy(find_unused_parameters=True) if name == "ddp" else name
    fabric = Fabric(accelerator="cpu", devices=ctx.world_size, strategy=strategy)
    fabric.launch()
    seed_everything()
    return fabric


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.module.state_dict().items()}


def net_inputs(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7 + rank)
    return [
        (
            torch.randn(8, 6, generator=generator),
            torch.randint(3, (8,), generator=generator),
            torch.tensor(step % 2 == 0),
        )
        for step in range(STEPS)
    ]


def train_net(ctx: Context, name: str, optimizers: Callable[[Net], list[Any]]) -> dict[str, Any]:
    fabric = start(ctx, name)
    net = Net()
    net, *steppers = fabric.setup(net, *optimizers(net))
    losses = []
    for x, target, use in net_inputs(ctx.rank):
        loss = nn.functional.cross_entropy(net(x, use), target)
        for stepper in steppers:
            stepper.zero_grad()
        fabric.backward(loss)
        for stepper in steppers:
            stepper.step()
        losses.append(loss.item())
    net.eval()
    with torch.no_grad():
        answer = net(torch.ones(4, 6), torch.tensor(True))
    return {"losses": losses, "state": tensors(net), "answer": answer}


def both(ctx: Context, optimizers: Callable[[Net], list[Any]]) -> dict[str, Any]:
    return {name: train_net(ctx, name, optimizers) for name in ("ddp", "goose3d")}


def _sgd(ctx: Context) -> dict[str, Any]:
    def optimizers(net: Net) -> list[Any]:
        return [SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)]

    return both(ctx, optimizers)


def _adamw_loop(ctx: Context) -> dict[str, Any]:
    return both(ctx, lambda net: [AdamW(net.parameters(), lr=0.01, fused=False)])


def _adamw_default(ctx: Context) -> dict[str, Any]:
    return both(ctx, lambda net: [AdamW(net.parameters(), lr=0.01)])


def _several_optimizers(ctx: Context) -> dict[str, Any]:
    def optimizers(net: Net) -> list[Any]:
        rest = [p for n, p in net.named_parameters() if not n.startswith("body")]
        return [SGD(net.body.parameters(), lr=0.1), AdamW(rest, lr=0.01, fused=False)]

    return both(ctx, optimizers)


def _llama(ctx: Context) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("ddp", "goose3d"):
        fabric = start(ctx, name)
        model = tiny_model("llama", dtype=torch.float32)
        model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
        losses = []
        for batch in batches(STEPS, padded=False):
            full = {**batch, "labels": batch["input_ids"]}  # equally many tokens on both ranks
            loss = model(**rows_of(full, ctx.rank, 2)).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss).item())
        results[name] = {"losses": losses, "state": tensors(model)}
    return results


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return world(2, _sgd, _adamw_loop, _adamw_default, _several_optimizers, _llama)


def furthest(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max((mine[k].double() - theirs[k].double()).abs().max().item() for k in mine)


@pytest.mark.parametrize("run", ["sgd", "adamw_loop", "several_optimizers"])
def test_any_module_trains_to_the_last_bit_as_with_ddp(
    runs: dict[str, list[Any]], run: str
) -> None:
    for rank in good(runs[run]):
        ddp, mine = rank["ddp"], rank["goose3d"]
        assert mine["losses"] == ddp["losses"]
        assert furthest(mine["state"], ddp["state"]) == 0.0
        assert torch.equal(mine["answer"], ddp["answer"])


def test_buffers_are_those_of_the_first_replica(runs: dict[str, list[Any]]) -> None:
    first, second = (rank["goose3d"] for rank in good(runs["sgd"]))
    assert torch.equal(first["answer"], second["answer"])
    assert torch.equal(
        first["state"]["body.1.running_mean"], second["state"]["body.1.running_mean"]
    )
    assert first["state"]["body.1.num_batches_tracked"].item() == STEPS


def test_an_unused_parameter_is_left_alone(runs: dict[str, list[Any]]) -> None:
    seed_everything()
    fresh = Net()
    for rank in good(runs["sgd"]):
        # Weight decay would have moved it, if it had had a gradient of zeros.
        assert torch.equal(rank["goose3d"]["state"]["never.weight"], fresh.never.weight)


def test_adamw_differs_by_the_fused_kernel_alone(runs: dict[str, list[Any]]) -> None:
    # An AdamW that leaves foreach and fused open is stepped by torch's fused kernel, three times
    # as fast on the CPU; with fused=False it has the bits of ddp (above).
    for rank in good(runs["adamw_default"]):
        ddp, mine = rank["ddp"], rank["goose3d"]
        assert mine["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
        # Batch norm takes the bias before it away again; its gradient is noise, its mean the bias.
        noise = ("body.0.bias", "body.1.running_mean")
        kept = {name: value for name, value in mine["state"].items() if name not in noise}
        same = {name: value for name, value in ddp["state"].items() if name not in noise}
        assert 0.0 < furthest(kept, same) < 1e-5


def test_a_causal_lm_differs_by_its_loss_alone(runs: dict[str, list[Any]]) -> None:
    # Our loss is its own function: its sum over the tokens has other roundings than torch's mean.
    for rank in good(runs["llama"]):
        ddp, mine = rank["ddp"], rank["goose3d"]
        assert mine["losses"] == pytest.approx(ddp["losses"], rel=1e-6)
        assert furthest(mine["state"], ddp["state"]) < 1e-6
