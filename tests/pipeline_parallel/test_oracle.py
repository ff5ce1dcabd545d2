"""The gradients are those of torch's own pipeline runtime, bit for bit.

The same stages run under ``torch.distributed.pipelining``'s schedules, which send, receive and
accumulate by other code in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from goose_strategy.grads.store import WeightGradStore
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.pipeline_parallel.balance import count_work
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.engine import Engine
from goose_strategy.pipeline_parallel.links import connect_stages
from goose_strategy.pipeline_parallel.microbatch import split_batch
from goose_strategy.pipeline_parallel.partition import partition_layers
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.program import splits_backward
from goose_strategy.pipeline_parallel.stage import ModelPart, PipelineStage, cut_model
from goose_strategy.tensor_parallel.defer import defer_weight_gradients
from tests.harness.models import batches
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.pipeline_parallel.cases import model_of, summed_loss
from tests.pipeline_parallel.test_links import CPU, gradients_of, make_mesh

SINGLE = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
SEVERAL = {
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "ZBH1": ScheduleInterleavedZeroBubble,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
}
ROWS, COLUMNS, MICROBATCHES = 8, 12, 4


class Adapter(nn.Module):
    """What torch takes for a stage: hidden states in and out, everything else by keyword."""

    def __init__(self, stage: PipelineStage) -> None:
        super().__init__()
        self.module = stage.module
        self.stage = stage

    def forward(self, carried: Tensor, **inputs: Any) -> Tensor:
        received = () if self.stage.is_first else (carried,)
        output = self.stage.forward(inputs, received)
        return output.logits if self.stage.is_last else output[0]


def put_off(store: WeightGradStore) -> Callable[[], None]:
    """Return what our layers have put off, as torch's ``dw_builder`` wants it."""
    store.active = False
    work = store.take()
    store.active = True
    return work.run


def torch_gradients(
    part: ModelPart, batch: dict[str, Tensor], schedule: str, group: Any
) -> dict[str, Tensor]:
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    count = (labels[:, 1:] != -100).sum()
    rows = ROWS // MICROBATCHES
    hidden = torch.empty(rows, COLUMNS, 32, dtype=torch.float64, requires_grad=True)
    logits = torch.empty(rows, COLUMNS, 97, dtype=torch.float64, requires_grad=True)
    builder = None
    if part.store is not None:
        # Torch has no sign for "input gradients only"; what it does not run at once is put off.
        part.store.active = True
        builder = partial(put_off, part.store)
    theirs = [
        TorchStage(
            Adapter(stage),
            stage.index,
            stage.num_stages,
            CPU,
            input_args=inputs["input_ids"][:rows] if stage.is_first else hidden,
            output_args=logits if stage.is_last else hidden,
            group=group,
            dw_builder=builder,
        )
        for stage in part.stages
    ]
    make: Any = SINGLE.get(schedule) or SEVERAL[schedule]
    runner = make(
        theirs[0] if schedule in SINGLE else theirs,
        MICROBATCHES,
        loss_fn=lambda out, target: summed_loss(out, target, num_items_in_batch=count),
        scale_grads=False,
    )
    arguments = (inputs["input_ids"],) if part.rank == 0 else ()
    runner.step(*arguments, target=labels if part.has_loss else None, **inputs)
    if part.store is not None:
        part.store.active = False
    return gradients_of(part)


def stages_of(model: nn.Module, mesh: ParallelMesh, config: PipelineConfig) -> ModelPart:
    chunks, info = config.chunks(mesh.pp_size), probe_model(model)
    bounds = partition_layers("uniform", count_work(model, info), chunks)
    part = cut_model(model, info, bounds, mesh.pp_rank, chunks)
    if splits_backward(config.schedule):
        part = replace(part, store=WeightGradStore())
        defer_weight_gradients(model, part.store)
    return part


def both(ctx: Context, schedule: str) -> dict[str, bool]:
    mesh = make_mesh(ctx, ctx.world_size)
    config = PipelineConfig(schedule=schedule, num_microbatches=MICROBATCHES)
    part = stages_of(model_of("qwen3", layers=8), mesh, config)
    batch = batches(1, batch_size=ROWS, seq_len=COLUMNS)[0]
    theirs = torch_gradients(part, batch, schedule, mesh.pp_forward)
    part.module.zero_grad()
    engine = Engine(part, connect_stages(mesh, part.chunks), config, rank=ctx.rank)
    count = (batch["labels"][:, 1:] != -100).sum()
    parts = split_batch({**batch, "num_items_in_batch": count}, config, stages=ctx.world_size)
    engine.run(parts, train=True)
    mine = gradients_of(part)
    assert mine.keys() == theirs.keys()
    mesh.close()
    return {name: torch.equal(mine[name], theirs[name]) for name in mine}


@pytest.mark.parametrize("schedule", [*SINGLE, *SEVERAL])
@pytest.mark.parametrize("ranks", [2, 4])
def test_torchs_runtime_is_matched(schedule: str, ranks: int) -> None:
    for equal in run_ranks(both, ranks, schedule):
        assert equal
        assert all(equal.values()), equal
