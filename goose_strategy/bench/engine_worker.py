"""One rank of ``goose3d bench engine``: ``python -m goose_strategy.bench.engine_worker RESULT``.

Both runtimes drive the same stage in the same processes, a step of one after a step of the other,
so that neither meets a quieter machine. The job comes on standard input, the process group's
coordinates from the environment, as under ``torchrun``.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning import Fabric
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from goose_strategy.bench import sleeping
from goose_strategy.bench.job import EngineJob, load_engine
from goose_strategy.comm.collectives import barrier
from goose_strategy.errors import ScheduleError
from goose_strategy.grads.store import WeightGradStore
from goose_strategy.mesh.host import PEERS
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.engine import Engine
from goose_strategy.pipeline_parallel.links import StageLinks, connect_stages
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.program import chunks_of, splits_backward
from goose_strategy.pipeline_parallel.stage import ModelPart, PipelineStage, cut_model
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE
from goose_strategy.tensor_parallel.defer import defer_weight_gradients

if TYPE_CHECKING:
    Run = Callable[[], object]


class Case(NamedTuple):
    """What the engine runs.

    Attributes:
        schedule: Name of the schedule.
        recompute: Whether the forwards are computed again.
    """

    schedule: str
    recompute: bool = False


CASES: Mapping[str, Case] = {
    **{name: Case(name) for name in CATALOGUE},
    "1F1B recompute": Case("1F1B", recompute=True),
}
"""What is measured, by the name in the report."""

# torch's runtime has no recompute between its actions.
_THEIRS: Mapping[Case, Callable[..., Any]] = {
    Case("GPipe"): ScheduleGPipe,
    Case("1F1B"): Schedule1F1B,
    Case("Interleaved1F1B"): ScheduleInterleaved1F1B,
    Case("LoopedBFS"): ScheduleLoopedBFS,
    # With one stage per rank, torch's is the schedule that others call ZB-H1.
    Case("ZBH1"): ScheduleInterleavedZeroBubble,
    Case("InterleavedZeroBubble"): ScheduleInterleavedZeroBubble,
    Case("ZBVZeroBubble"): ScheduleZBVZeroBubble,
    Case("DualPipeV"): ScheduleDualPipeV,
}
_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Work:
    """What both runtimes run.

    Attributes:
        mesh: The mesh, pipeline only.
        part: This rank's stages.
        links: Its links to its neighbours.
        batch: The global batch, a row per microbatch.
        expected: One process's gradients of the stage's parameters.
    """

    mesh: ParallelMesh
    part: ModelPart
    links: StageLinks
    batch: dict[str, Tensor]
    expected: dict[str, Tensor]


def main(result: Path) -> None:
    """Run the job on standard input as this rank; write what was measured to ``result``."""
    job = load_engine(sys.stdin.read())
    torch.set_num_threads(job.threads)
    fabric = Fabric(accelerator="cpu", devices=job.devices, strategy="ddp")
    fabric.launch()
    mesh = make_mesh(job)
    measured = measure(mesh, job)
    barrier(mesh.control)  # nobody leaves while a peer still talks
    mesh.close()
    result.write_text(json.dumps(measured))


def make_mesh(job: EngineJob) -> ParallelMesh:
    """Make the mesh. Collective."""
    return ParallelMesh.create(
        MeshLayout.from_world(job.devices, tp=1, pp=job.devices),
        device=torch.device("cpu"),
        timeout=_TIMEOUT,
        shared_memory=job.shared_memory,
    )


def build(mesh: ParallelMesh, job: EngineJob, case: Case) -> Work:
    """Make this rank's stages, one layer each, and what one process makes of the batch."""
    chunks = chunks_of(case.schedule, job.devices)
    torch.manual_seed(job.seed)
    model = sleeping.SleepingModel(chunks.stages)
    batch = sleeping.make_batch(job.microbatches, job.seed)
    expected = _one_process(model, batch)
    info = probe_model(model, {"input_ids": batch["input_ids"][:2]})
    part = cut_model(model, info, range(chunks.stages + 1), mesh.pp_rank, chunks)
    kept = {name: expected[name] for name, _ in model.named_parameters()}
    return Work(mesh, part, connect_stages(mesh, chunks), batch, kept)


def measure(mesh: ParallelMesh, job: EngineJob) -> dict[str, Any]:
    """Time all cases; collective.

    Returns:
        ``"shared_memory"``, and under ``"cases"`` per case and runtime (``"ours"``, ``"torch"``) a
        list of timed steps, each with its ``start`` and ``end`` on the machine's clock and the CPU
        seconds of this process, ``cpu``.

    Raises:
        ScheduleError: If gradients are not those of one process.
    """
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name, case in CASES.items():
        works = {"ours": build(mesh, job, case)}
        runs = {"ours": _ours(works["ours"], case, job)}
        if case in _THEIRS:
            works["torch"] = build(mesh, job, case)
            # Torch's schedules take some numbers of microbatches only, and say so like this.
            with suppress(ValueError):
                runs["torch"] = _theirs(works["torch"], case, job)
        found[name] = {runtime: [] for runtime in runs}
        for index in range(job.warmup + job.steps):
            for runtime in list(runs)[:: 1 if index % 2 == 0 else -1]:
                step = _timed(runs[runtime], works[runtime])
                _check(works[runtime], f"{name} under {runtime}")
                if index >= job.warmup:
                    found[name][runtime].append(step)
    return {"cases": found, "shared_memory": mesh.pp_forward in PEERS}


def _timed(run: Run, work: Work) -> dict[str, float]:
    work.part.module.zero_grad()
    barrier(work.mesh.control)
    cpu, start = time.process_time(), time.perf_counter()
    run()
    end = time.perf_counter()
    return {"start": start, "end": end, "cpu": time.process_time() - cpu}


def _check(work: Work, what: str) -> None:
    """Compare gradients with one process's: the time of a wrong step is worth nothing."""
    for name, parameter in work.part.module.named_parameters():
        gradient, expected = parameter.grad, work.expected[name]
        if gradient is None or not torch.allclose(gradient, expected, rtol=1e-4, atol=1e-5):
            raise ScheduleError(
                f"{what} gives {name} another gradient than one process.",
                rank=work.mesh.rank,
                stage=work.part.rank,
            )


def _one_process(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model(**batch)["loss"].backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def _ours(work: Work, case: Case, job: EngineJob) -> Run:
    config = PipelineConfig(schedule=case.schedule, recompute="full" if case.recompute else "none")
    part, model = work.part, work.part.module
    if splits_backward(case.schedule):
        store = WeightGradStore()
        defer_weight_gradients(model, store)
        part = replace(part, store=store)
    _let_sleep(model, job, part.store)
    engine = Engine(part, work.links, config, rank=work.mesh.rank)
    rows = len(work.batch["labels"])
    parts = [
        {key: value[row : row + 1] for key, value in work.batch.items()} for row in range(rows)
    ]
    return lambda: engine.run(parts, train=True)


def _let_sleep(model: nn.Module, job: EngineJob, store: sleeping.Collects | None) -> None:
    if isinstance(model, sleeping.SleepingModel):
        model.set_sleep(forward_s=job.forward_s, backward_s=2 * job.forward_s, store=store)


class _Adapter(nn.Module):
    """What torch takes for a stage: one tensor in, one out, everything else by keyword."""

    def __init__(self, stage: PipelineStage) -> None:
        super().__init__()
        self.module = stage.module
        self.stage = stage

    def forward(self, carried: Tensor, *, input_ids: Tensor) -> Tensor:
        received = () if self.stage.is_first else (carried,)
        output = self.stage.forward({"input_ids": input_ids}, received)
        tensor: Tensor = output["logits"] if self.stage.is_last else output[0]
        return tensor


class _Queue:
    """What torch's runtime needs to compute weights' parts later: ``dw_builder``."""

    def __init__(self) -> None:
        self.active = True
        self._naps: list[sleeping.Nap] = []

    def push(self, owed: sleeping.Nap) -> None:
        self._naps.append(owed)

    def build(self) -> Callable[[], None]:
        naps, self._naps = self._naps, []

        def run() -> None:
            for nap in naps:
                nap.compute()

        return run


def _theirs(work: Work, case: Case, job: EngineJob) -> Run:
    queue = _Queue() if splits_backward(case.schedule) else None
    _let_sleep(work.part.module, job, queue)
    ids, labels = work.batch["input_ids"], work.batch["labels"]
    hidden = torch.empty(1, sleeping.COLUMNS, sleeping.WIDTH, requires_grad=True)
    logits = torch.empty(1, sleeping.COLUMNS, sleeping.VOCABULARY, requires_grad=True)
    # With example tensors, torch exchanges no shapes in its first step.
    theirs = [
        TorchStage(
            _Adapter(stage),
            stage.index,
            stage.num_stages,
            work.mesh.device,
            input_args=ids[:1] if stage.is_first else hidden,
            output_args=logits if stage.is_last else hidden,
            group=work.mesh.pp_forward,
            dw_builder=queue.build if queue else None,
        )
        for stage in work.part.stages
    ]
    single = case.schedule in ("GPipe", "1F1B")
    schedule = _THEIRS[case](
        theirs[0] if single else theirs,
        len(labels),
        loss_fn=sleeping.sum_loss,
        scale_grads=False,
    )
    stages = work.part.stages
    entry = (ids,) if stages[0].is_first else ()
    target = labels if work.part.has_loss else None
    return lambda: schedule.step(*entry, target=target, input_ids=ids)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
