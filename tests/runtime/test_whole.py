"""The state dict of one process, put together from all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from goose_strategy.optim.config import ZeroConfig
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.compare import token_loss
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import CPU

STEPS = 3


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 2e-3},
    ]


def _whole(
    ctx: Context, tp: int, pp: int, dtype: torch.dtype, rank0_only: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    runtime = ParallelRuntime(
        RuntimeConfig(
            tp=tp,
            pp=pp,
            pipeline=PipelineConfig(num_microbatches=2),
            zero=ZeroConfig(bucket_numel=4096),
        )
    )
    runtime.start(CPU)
    mesh = runtime.mesh
    model = tiny_model("llama", tied=True, dtype=dtype)
    optimizer = optim.AdamW(groups(model), lr=1e-3)
    runtime.shard_module(model, optimizers=[optimizer])
    for batch in batches(STEPS):
        loss = model(**rows_of(batch, mesh.dp_rank, mesh.dp_size)).loss
        with runtime.backward(loss):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = runtime.full_optimizer_state(optimizer, rank0_only=rank0_only)
    runtime.stop()
    return state, {}


def _alone(dtype: torch.dtype) -> tuple[Any, Any]:
    model = tiny_model("llama", tied=True, dtype=dtype)
    optimizer = optim.AdamW(groups(model), lr=1e-3)
    for batch in batches(STEPS):
        token_loss(model(**batch).logits, batch["labels"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(("tp", "pp", "world"), [(1, 1, 2), (2, 2, 8), (1, 2, 2)])
def test_it_is_what_one_process_has(tp: int, pp: int, world: int) -> None:
    _, optimizer = _alone(torch.float64)
    expected = optimizer.state_dict()
    ranks = run_ranks(_whole, world, tp, pp, torch.float64, True)
    assert all(state == {} for state, _ in ranks[1:])
    mine = ranks[0][0]
    assert [g["params"] for g in mine["param_groups"]] == [
        g["params"] for g in expected["param_groups"]
    ]
    assert [g["lr"] for g in mine["param_groups"]] == [1e-3, 2e-3]
    assert mine["state"].keys() == expected["state"].keys()
    for index, entries in expected["state"].items():
        assert mine["state"][index].keys() == entries.keys()
        for key, value in entries.items():
            found = mine["state"][index][key]
            assert found.shape == value.shape
            assert (found - value).norm() <= 1e-9 * value.norm(), (index, key)
    optimizer.load_state_dict(mine)


def test_narrow_states_are_told_in_fp32_with_their_main_weights() -> None:
    ranks = run_ranks(_whole, 4, 1, 2, torch.bfloat16, False)
    model, optimizer = _alone(torch.float32)
    for state, _ in ranks:
        for index, param in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            entries = state["state"][index]
            assert entries["main"].shape == entries["exp_avg"].shape == param.shape
            assert entries["main"].dtype == entries["exp_avg_sq"].dtype == torch.float32
            assert (entries["main"] - param).norm() < 0.02 * param.norm()
            assert entries["step"] == STEPS
    # torch takes it, and steps on.
    optimizer.load_state_dict(ranks[0][0])
    model(**batches(1)[0]).loss.backward()
    optimizer.step()
