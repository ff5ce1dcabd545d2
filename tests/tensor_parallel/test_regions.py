from __future__ import annotations

import torch
from torch import Tensor

from goose_strategy.comm.recorder import Recorder, recording
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.models.registry import plan_for
from goose_strategy.tensor_parallel.parallelize import parallelize
from goose_strategy.tensor_parallel.regions import enter_island, leave_island
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import with_mesh


def test_alone_nothing_happens() -> None:
    x = torch.randn(3, requires_grad=True)
    assert enter_island(x, None) is x
    assert leave_island(x, None) is x


@with_mesh
def _through(ctx: Context, mesh: ParallelMesh) -> tuple[Tensor, Tensor, Tensor]:
    group = mesh.tp
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    weight = float(ctx.rank + 1)
    entered = enter_island(x, group)
    total = leave_island(entered * weight, group)
    total.backward(torch.tensor([1.0, 10.0]))
    with torch.no_grad():
        assert enter_island(x, group) is x
        summed = leave_island(x * weight, group)
    assert x.grad is not None
    return total.detach(), x.grad, summed


def test_the_output_is_summed_forward_and_the_input_backward() -> None:
    for total, grad, summed in run_ranks(_through, 2):
        assert total.tolist() == summed.tolist() == [3.0, 6.0]
        assert grad.tolist() == [3.0, 30.0]


@with_mesh
def _autocast(ctx: Context, mesh: ParallelMesh) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    group = mesh.tp
    x, wide = torch.randn(2, requires_grad=True), torch.randn(2, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        entered = enter_island(x, group)
        untouched = enter_island(wide, group)
    entered.sum().backward()
    assert x.grad is not None
    return entered.dtype, x.grad.dtype, untouched.dtype


def test_autocast_casts_once_at_the_entry() -> None:
    expected = (torch.bfloat16, torch.float32, torch.float64)
    assert run_ranks(_autocast, 2) == [expected, expected]


@with_mesh
def _layer_launches(
    ctx: Context, mesh: ParallelMesh
) -> tuple[list[tuple[str, tuple[int, ...]]], ...]:
    model = tiny_model("qwen3", layers=1)
    parallelize(model, plan_for(model), mesh)
    layer = model.model.layers[0]
    x = torch.randn(2, 5, 32, dtype=torch.float64, requires_grad=True)
    rotary = model.model.rotary_emb(x, torch.arange(5)[None])
    forward, backward = Recorder(), Recorder()
    with recording(forward):
        output = layer(x, position_embeddings=rotary, attention_mask=None)
    with recording(backward):
        output.sum().backward()
    launches = [(forward.launches, backward.launches)]
    return tuple([(one.op, one.shape) for one in part] for part in launches[0])


def test_one_all_reduce_per_island_and_direction() -> None:
    whole = ("all_reduce sum", (2, 5, 32))
    assert run_ranks(_layer_launches, 2) == [([whole] * 2, [whole] * 2)] * 2
