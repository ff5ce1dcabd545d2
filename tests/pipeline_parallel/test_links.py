"""Stages on ranks of their own, over process groups."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from goose_strategy.comm.recorder import Recorder, mismatches
from goose_strategy.errors import MeshError
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.pipeline_parallel.balance import count_work
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.engine import Engine
from goose_strategy.pipeline_parallel.links import StageLinks, connect_stages
from goose_strategy.pipeline_parallel.microbatch import split_batch
from goose_strategy.pipeline_parallel.partition import partition_layers
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.stage import ModelPart, cut_model
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from tests.harness.compare import assert_close_named
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks
from tests.pipeline_parallel.cases import batch_of, counted, model_of, reference

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=30)


def make_mesh(ctx: Context, pp: int) -> ParallelMesh:
    layout = MeshLayout.from_world(ctx.world_size, tp=1, pp=pp)
    return ParallelMesh.create(layout, device=CPU, timeout=TIMEOUT)


def make_part(family: str, mesh: ParallelMesh, *, tied: bool = False) -> ModelPart:
    model = model_of(family, tied=tied)
    info = probe_model(model)
    bounds = partition_layers("uniform", count_work(model, info), Chunks(mesh.pp_size))
    return cut_model(model, info, bounds, mesh.pp_rank)


def gradients_of(part: ModelPart) -> dict[str, Tensor]:
    named = part.module.named_parameters()
    return {n: p.grad.clone() for n, p in named if p.grad is not None}


def calls(dp_rank: int) -> list[list[dict[str, Any]]]:
    """Three calls whose lengths differ from call to call and, in the last, within it."""
    split = [
        split_batch(batch_of(rows, seq_len=length, seed=dp_rank), PipelineConfig(), stages=2)
        for rows, length in ((5, 12), (3, 7))
    ]
    return [*split, counted([batch_of(1, seq_len=n, seed=dp_rank) for n in (12, 4, 9, 12)])]


def train(
    ctx: Context, family: str, pp: int, schedule: str
) -> tuple[list[tuple[Any, ...]], Recorder]:
    mesh = make_mesh(ctx, pp)
    part = make_part(family, mesh, tied=True)
    config = PipelineConfig(schedule=schedule)
    recorder = Recorder()
    links = connect_stages(mesh, recorder=recorder)
    engine = Engine(part, links, config, rank=ctx.rank)
    out = []
    for microbatches in calls(mesh.dp_rank):
        part.module.zero_grad()
        loss = engine.run(microbatches, train=True).loss
        out.append((mesh.dp_rank, loss, gradients_of(part), part.tied_copies))
    engine.run(calls(mesh.dp_rank)[0], train=False)
    mesh.close()
    return out, recorder


@pytest.mark.parametrize(
    ("family", "world", "pp", "schedule"),
    [("llama", 2, 2, "GPipe"), ("qwen3", 4, 4, "1F1B"), ("llama", 4, 2, "1F1B")],
)
def test_one_process_is_matched(family: str, world: int, pp: int, schedule: str) -> None:
    ranks, recorders = zip(*run_ranks(train, world, family, pp, schedule), strict=True)
    assert mismatches(dict(enumerate(recorders))) == []
    assert all(recorder.launches for recorder in recorders)
    model = model_of(family, tied=True)
    for dp_rank in range(world // pp):
        for call, microbatches in enumerate(calls(dp_rank)):
            loss, expected = reference(model, microbatches)
            results = [rank[call] for rank in ranks if rank[call][0] == dp_rank]
            assert torch.equal(results[-1][1], loss)
            assert all(result[1] is None for result in results[:-1])
            mine: dict[str, Tensor] = {}
            for _, _, gradients, copies in results:
                for name, gradient in gradients.items():
                    whole = copies.get(name, name)
                    mine[whole] = mine[whole] + gradient if whole in mine else gradient
            assert_close_named(mine, expected, 1e-14)


def fail(ctx: Context) -> None:
    mesh = make_mesh(ctx, 2)
    part = make_part("llama", mesh)
    if mesh.is_first_stage:
        numbers = itertools.count()

        def broken(*_: Any) -> None:
            if next(numbers) == 1:
                raise ArithmeticError("lost a digit")

        part.module.model.layers[0].register_forward_hook(broken)
    engine = Engine(part, connect_stages(mesh), PipelineConfig(num_microbatches=4), rank=ctx.rank)
    engine.run(split_batch(batch_of(4), engine.config, stages=2), train=True)


def test_the_first_cause_is_seen() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail, 2)
    assert caught.value.rank == 0
    assert "0F1 failed: ArithmeticError: lost a digit [rank 0, stage 0, microbatch 1]" in str(
        caught.value
    )


def disagree(ctx: Context) -> None:
    mesh = make_mesh(ctx, 2)
    part = make_part("llama", mesh)
    engine = Engine(part, connect_stages(mesh), PipelineConfig(num_microbatches=1), rank=ctx.rank)
    batch = batch_of(2, seq_len=12 - 3 * ctx.rank)
    engine.run(split_batch(batch, engine.config, stages=2), train=True)


def test_stages_with_different_batches_are_told_apart() -> None:
    with pytest.raises(RankFailure, match="expects the message"):
        run_ranks(disagree, 2)


def alone(ctx: Context) -> None:
    mesh = make_mesh(ctx, 1)
    assert connect_stages(mesh) == StageLinks()
    mesh.close()
    broken = ParallelMesh(MeshLayout(tp=1, pp=2, dp=1), rank=0, device=CPU)
    with pytest.raises(MeshError, match="no group for its stages"):
        connect_stages(broken)


def test_without_stages_there_are_no_links() -> None:
    run_ranks(alone, 1)
