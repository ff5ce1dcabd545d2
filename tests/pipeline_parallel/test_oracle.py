"""The gradients are those of torch's own pipeline runtime, bit for bit.

The same stages run under ``torch.distributed.pipelining``'s schedules, which send, receive and
accumulate by other code in the same order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.engine import Engine
from goose_strategy.pipeline_parallel.links import connect_stages
from goose_strategy.pipeline_parallel.microbatch import split_batch
from goose_strategy.pipeline_parallel.stage import ModelPart, PipelineStage
from tests.harness.models import batches
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.pipeline_parallel.cases import summed_loss
from tests.pipeline_parallel.test_links import CPU, gradients_of, make_mesh, make_part

SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}
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


def torch_gradients(
    part: ModelPart, batch: dict[str, Tensor], schedule: str, group: Any
) -> dict[str, Tensor]:
    (stage,) = part.stages
    labels = batch["labels"]
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    count = (labels[:, 1:] != -100).sum()
    rows = ROWS // MICROBATCHES
    hidden = torch.empty(rows, COLUMNS, 32, dtype=torch.float64, requires_grad=True)
    logits = torch.empty(rows, COLUMNS, 97, dtype=torch.float64, requires_grad=True)
    entry = inputs["input_ids"][:rows] if stage.is_first else hidden
    theirs = TorchStage(
        Adapter(stage),
        stage.index,
        stage.num_stages,
        CPU,
        input_args=entry,
        output_args=logits if stage.is_last else hidden,
        group=group,
    )
    runner = SCHEDULES[schedule](
        theirs,
        MICROBATCHES,
        loss_fn=lambda out, target: summed_loss(out, target, num_items_in_batch=count),
        scale_grads=False,
    )
    arguments = (inputs["input_ids"],) if stage.is_first else ()
    runner.step(*arguments, target=labels if stage.is_last else None, **inputs)
    return gradients_of(part)


def both(ctx: Context, schedule: str) -> dict[str, bool]:
    mesh = make_mesh(ctx, ctx.world_size)
    part = make_part("qwen3", mesh)
    batch = batches(1, batch_size=ROWS, seq_len=COLUMNS)[0]
    theirs = torch_gradients(part, batch, schedule, mesh.pp_forward)
    part.module.zero_grad()
    config = PipelineConfig(schedule=schedule, num_microbatches=MICROBATCHES)
    engine = Engine(part, connect_stages(mesh), config, rank=ctx.rank)
    count = (batch["labels"][:, 1:] != -100).sum()
    parts = split_batch({**batch, "num_items_in_batch": count}, config, stages=ctx.world_size)
    engine.run(parts, train=True)
    mine = gradients_of(part)
    assert mine.keys() == theirs.keys()
    mesh.close()
    return {name: torch.equal(mine[name], theirs[name]) for name in mine}


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("stages", [2, 4])
def test_torchs_runtime_is_matched(schedule: str, stages: int) -> None:
    for equal in run_ranks(both, stages, schedule):
        assert equal
        assert all(equal.values()), equal
