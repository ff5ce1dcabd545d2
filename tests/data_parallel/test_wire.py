"""Gradients that travel in bf16: rounded once per rank, added in fp32."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from goose_strategy.comm.recorder import Recorder, recording
from goose_strategy.data_parallel.wire import NarrowSum
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from tests.data_parallel import toy
from tests.data_parallel.test_reducer import accumulated, ordinary, reference, run_sharded
from tests.data_parallel.toy import CPU, Sharded, adamw, assert_same, batch, largest_gap
from tests.harness.worker import Context
from tests.harness.world import run_ranks

WIDTH = 70_000


def parts(size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(size * WIDTH, generator=generator).to(dtype) for _ in range(size)]


def _summed(ctx: Context, dtype: torch.dtype, shared_memory: bool) -> Tensor:
    mesh = ParallelMesh.create(
        MeshLayout.from_world(ctx.world_size, tp=1, pp=1),
        device=CPU,
        timeout=timedelta(seconds=30),
        shared_memory=shared_memory,
    )
    flat = parts(ctx.world_size, dtype)[ctx.rank]
    kept = flat.clone()
    assert mesh.dp is not None
    pending = NarrowSum(flat, mesh.dp)
    pending.wait()
    pending.wait()
    own = flat.view(ctx.world_size, WIDTH)[ctx.rank].clone()
    flat.view(ctx.world_size, WIDTH)[ctx.rank].copy_(kept.view(ctx.world_size, WIDTH)[ctx.rank])
    assert torch.equal(flat, kept), "the other slices stay"
    mesh.close()
    return own


@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_part_is_rounded_once_and_added_in_rank_order(
    dtype: torch.dtype, shared_memory: bool
) -> None:
    whole = [part.bfloat16().float() for part in parts(4, dtype)]
    expected = ((whole[0] + whole[1]) + whole[2]) + whole[3]
    found = torch.cat(run_ranks(_summed, 4, dtype, shared_memory))
    assert torch.equal(found, expected.to(dtype))
    if dtype == torch.bfloat16:
        # What a sum in bf16 itself would give is another number in a third of the elements.
        narrow = parts(4, dtype)
        rounded = ((narrow[0] + narrow[1]) + narrow[2]) + narrow[3]
        assert (rounded != expected.bfloat16()).float().mean() > 0.1


@pytest.mark.parametrize("scenario", [ordinary, accumulated])
def test_training_follows_one_process_as_far_as_bf16_can(scenario: Any) -> None:
    expected = reference(scenario, adamw, dtype=torch.float32)
    options = {"dtype": torch.float32, "zero": {"wire": "bf16"}}
    for trace in run_ranks(run_sharded, 4, scenario, adamw, options):
        gap = largest_gap(trace.gradients[0], expected.gradients[0])
        assert 1e-4 < gap < 2**-8, gap
        assert_same(trace, expected, rel=0.05)


def _launches(ctx: Context, zero: dict[str, Any], dtype: torch.dtype) -> tuple[int, list[str]]:
    mesh = toy.make_mesh(ctx.world_size)
    driver = Sharded(toy.toy(dtype, branches=1), adamw, mesh, zero=zero)
    with recording(Recorder()) as recorder:
        driver.backward(driver.forward(driver.rows(batch(0, dtype))).square().mean())
    operations = [str(note) for note in recorder.launches if "exchange" in str(note)]
    scatters = [str(note) for note in recorder.launches if "reduce_scatter" in str(note)]
    driver.close()
    return len(scatters), operations


@pytest.mark.parametrize(
    ("zero", "dtype", "narrow"),
    [
        ({}, torch.float32, False),
        ({"wire": "bf16"}, torch.float32, True),
        ({"wire": "bf16"}, torch.float64, False),
        ({"wire": "bf16"}, torch.bfloat16, True),
        ({"grads": "bf16"}, torch.bfloat16, True),
    ],
)
def test_only_what_was_asked_for_travels_narrow(
    zero: dict[str, Any], dtype: torch.dtype, narrow: bool
) -> None:
    for scatters, exchanges in run_ranks(_launches, 2, zero, dtype):
        assert (scatters == 0) == narrow
        assert bool(exchanges) == narrow
        assert all("bfloat16" in launch for launch in exchanges)
