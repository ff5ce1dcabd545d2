"""Which schedule a model runs and which layers each of its stages gets, decided once for all ranks.

What hangs on a measurement comes out differently on every rank, and ranks that cut a model
differently hang in their first step. So rank 0 measures and the others take its answer; all compare
what came of it.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from goose_strategy.comm.collectives import all_gather_objects, broadcast_object
from goose_strategy.compat.torch import is_compiled
from goose_strategy.errors import PlanError
from goose_strategy.hub.twin import solid_copy
from goose_strategy.pipeline_parallel.auto import Question, choose_schedule
from goose_strategy.pipeline_parallel.balance import Work, count_work, model_parts
from goose_strategy.pipeline_parallel.measure import Sample, measure
from goose_strategy.pipeline_parallel.memory import Memory
from goose_strategy.pipeline_parallel.partition import partition_layers
from goose_strategy.pipeline_parallel.program import fingerprint, schedule_of, splits_backward
from goose_strategy.pipeline_parallel.report import PartitionReport, StageFigures
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE
from goose_strategy.pipeline_parallel.tables.choose import format_figures
from goose_strategy.pipeline_parallel.tables.insert import add_recompute
from goose_strategy.runtime.verdict import agreed, equal_everywhere

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.pipeline_parallel.config import PipelineConfig
    from goose_strategy.pipeline_parallel.minmax import Bounds
    from goose_strategy.pipeline_parallel.profile import Profile
    from goose_strategy.pipeline_parallel.stack import StackInfo
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks, Schedule
    from goose_strategy.runtime.settings import RuntimeConfig

LOGGER = logging.getLogger("goose_strategy")
"""Where rank 0 tells what was decided."""

_COLUMNS = 512
_GRADIENT, _STATE = 4, 8
"""Bytes per parameter of fp32 gradients and of AdamW's two fp32 moments."""
_USABLE = 0.9
"""Part of a device's free memory that a choice may count on: allocators lose some."""


@dataclass(frozen=True)
class PipelinePlan:
    """How a model is cut in depth.

    Attributes:
        config: The settings with the schedule that was chosen in them.
        chunks: Which rank holds which stages.
        bounds: First layer of every stage, and the number of layers.
        report: The same for people.
    """

    config: PipelineConfig
    chunks: Chunks
    bounds: Bounds
    report: PartitionReport


class Subject(NamedTuple):
    """The model that is planned for.

    Attributes:
        model: The whole model, before any surgery; may be on the meta device.
        probed: The model that was probed: itself, or a twin with values.
        info: What the probe found out.
    """

    model: nn.Module
    probed: nn.Module
    info: StackInfo


class _Answer(NamedTuple):
    """What rank 0 found out: plain values."""

    profile: Profile | None
    schedule: str
    per_rank: int | None
    bounds: Bounds | None
    choice: str


def plan_pipeline(subject: Subject, config: RuntimeConfig, mesh: ParallelMesh) -> PipelinePlan:
    """Choose the schedule, if that is asked for, and cut the layers. Collective over the world.

    Args:
        subject: The model.
        config: Settings of the runtime.
        mesh: The mesh.

    Returns:
        The plan, the same on all ranks; rank 0 logs its report.

    Raises:
        PlanError: On all ranks, if the model cannot be cut as asked, or not be measured, or no
            schedule fits into the memory.
    """
    pipeline = config.pipeline
    answer = _Answer(None, pipeline.schedule, pipeline.stages_per_rank, None, "")
    if pipeline.schedule == "auto" or pipeline.partition in ("time", "memory"):
        limit = _memory_limit(pipeline, mesh)
        ask = partial(_answer, subject, config, mesh, limit)
        mine = agreed(mesh, ask if mesh.rank == 0 else lambda: answer)
        answer = broadcast_object(mine, source=0, group=mesh.control)
    chosen = replace(pipeline, schedule=answer.schedule, stages_per_rank=answer.per_rank)
    if pipeline.schedule == "auto":
        chosen = replace(chosen, memory_limit_bytes=None)
    chunks = chosen.chunks(mesh.pp_size)
    work = count_work(subject.model, subject.info)
    bounds = answer.bounds or partition_layers(pipeline.partition, work, chunks)
    text = f"{fingerprint(answer.schedule)} {answer.per_rank} {bounds}"
    equal_everywhere(mesh, hashlib.sha256(text.encode()).hexdigest(), "the plan of the pipeline")
    report = _report(subject, config, mesh, _Cut(chosen, chunks, bounds, answer))
    if mesh.rank == 0:
        LOGGER.info("%s", report)
    return PipelinePlan(chosen, chunks, bounds, report)


def _answer(
    subject: Subject, config: RuntimeConfig, mesh: ParallelMesh, limit: int | None
) -> _Answer:
    """Measure, and decide what hangs on it."""
    pipeline, model = config.pipeline, subject.model
    timed = pipeline.schedule == "auto" or pipeline.partition == "time"
    unread = any(param.is_meta for param in model.parameters())
    sample = Sample(_example_shape(model, pipeline), mesh.device, timed=timed)
    if unread:
        sample = replace(sample, copied=solid_copy)
    profile = measure(subject.probed, subject.info, sample)
    memory = _memory(subject, config, mesh, profile)
    microbatches = pipeline.microbatches(mesh.pp_size)
    if pipeline.schedule != "auto":
        chunks = pipeline.chunks(mesh.pp_size)
        if pipeline.partition == "time":
            bounds = partition_layers("time", profile.work(), chunks)
        else:
            schedule = schedule_of(pipeline.schedule, chunks, microbatches)
            bounds = partition_layers("memory", memory.load(_again(schedule, pipeline)), chunks)
        return _Answer(profile, pipeline.schedule, pipeline.stages_per_rank, bounds, "")
    question = Question(
        memory,
        mesh.pp_size,
        microbatches,
        partition=pipeline.partition,
        names=_names(model, pipeline),
        stages_per_rank=pipeline.stages_per_rank,
        memory_limit=limit,
    )
    choice = choose_schedule(question)
    best = choice.best
    text = format_figures(choice, measured=True)
    return _Answer(profile, best.name, best.chunks.per_rank, question.cut(best), text)


def _names(model: nn.Module, pipeline: PipelineConfig) -> tuple[str, ...]:
    """Return the schedules that may be chosen; compiled layers cannot put weight gradients off."""
    inside = (module for name, module in model.named_modules() if name)
    compiled = bool(pipeline.compile_layers) or any(map(is_compiled, inside))
    return tuple(name for name in CATALOGUE if not (compiled and splits_backward(name)))


def _again(schedule: Schedule, pipeline: PipelineConfig) -> Schedule:
    if pipeline.recompute != "full":
        return schedule
    return schedule.with_table(add_recompute(schedule.table))


def _example_shape(model: nn.Module, pipeline: PipelineConfig) -> tuple[int, int]:
    """Return the rows and columns that are measured: those given, or a row of 512 tokens."""
    if pipeline.example_shape is not None:
        rows, columns = pipeline.example_shape
        return rows, columns
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return 1, min(_COLUMNS, longest) if isinstance(longest, int) and longest > 0 else _COLUMNS


def _memory_limit(pipeline: PipelineConfig, mesh: ParallelMesh) -> int | None:
    """Return the bytes that every rank may hold; by default what the fullest device has left."""
    if pipeline.schedule != "auto":
        return None
    if pipeline.memory_limit_bytes is not None:
        return pipeline.memory_limit_bytes
    mine = None
    if mesh.device.type == "cuda":
        free = int(_USABLE * torch.cuda.mem_get_info(mesh.device)[0])
        uuid = torch.cuda.get_device_properties(mesh.device).uuid
        mine = (free, f"{socket.gethostname()} {uuid}")
    return smallest_share(all_gather_objects(mine, mesh.control))


def smallest_share(ranks: Sequence[tuple[int, str] | None]) -> int | None:
    """Return the bytes of the rank that has the fewest, where ranks may share a card.

    Args:
        ranks: For each rank the free bytes of its card and the card's name, or ``None``.
    """
    known = [rank for rank in ranks if rank is not None]
    sharing = Counter(card for _, card in known)
    return min((free // sharing[card] for free, card in known), default=None)


def _memory(
    subject: Subject, config: RuntimeConfig, mesh: ParallelMesh, profile: Profile
) -> Memory:
    recompute = config.pipeline.recompute
    named = recompute if isinstance(recompute, str) else "none"
    resident = model_parts(subject.model, subject.info).work(resident_bytes(mesh))
    return Memory(resident, profile, named)


def resident_bytes(mesh: ParallelMesh) -> Callable[[nn.Parameter], int]:
    """Return what a parameter costs for as long as training does, in bytes per rank.

    The weight; in training its fp32 gradient (fp64 for fp64), and over the dp ranks an fp32 main
    weight where it is narrower and two moments, as AdamW has them: 6 + 12 / dp for bf16, 8 + 8 / dp
    for fp32. A tp rank holds its part of matrices.
    """

    def cost(param: nn.Parameter) -> int:
        wide = max(param.element_size(), _GRADIENT)
        each: float = param.element_size()
        if param.requires_grad:
            main = wide * (param.element_size() < wide)
            each += wide + (main + _STATE * wide // _GRADIENT) / mesh.dp_size
        parts = mesh.tp_size if param.ndim > 1 else 1
        return round(param.numel() * each / parts)

    return cost


class _Cut(NamedTuple):
    """What was decided."""

    config: PipelineConfig
    chunks: Chunks
    bounds: Bounds
    answer: _Answer


def _report(
    subject: Subject, config: RuntimeConfig, mesh: ParallelMesh, cut: _Cut
) -> PartitionReport:
    chunks, bounds, profile = cut.chunks, cut.bounds, cut.answer.profile
    timed = profile is not None and profile.timed
    parts = model_parts(subject.model, subject.info).held_by(chunks)
    counted = count_work(subject.model, subject.info)
    work = profile.work() if profile is not None and timed else counted
    stages = chunks.stages

    def by_stage(work: Work) -> list[int]:
        return work.load(stages).by_stage(bounds)

    costs = by_stage(work)
    held = None if profile is None else _held(subject, config, mesh, cut)
    figures = [
        StageFigures(
            stage=stage,
            rank=chunks.rank_of(stage),
            layers=range(bounds[stage], bounds[stage + 1]),
            parameters=parameters,
            share=costs[stage] / max(sum(costs), 1),
            time=costs[stage] if timed else None,
            resident=resident,
            activations=None if held is None else held[stage],
        )
        for stage, (parameters, resident) in enumerate(
            zip(
                by_stage(parts.work(nn.Parameter.numel)),
                by_stage(parts.work(resident_bytes(mesh))),
                strict=True,
            )
        )
    ]
    name = config.pipeline.partition
    return PartitionReport(
        cut.config.schedule, name, chunks, tuple(figures), choice=cut.answer.choice
    )


def _held(subject: Subject, config: RuntimeConfig, mesh: ParallelMesh, cut: _Cut) -> list[int]:
    """Return, per stage, the bytes of all microbatches that it holds at once."""
    if cut.answer.profile is None:
        raise PlanError("activations were not measured.")
    microbatches = cut.config.microbatches(mesh.pp_size)
    schedule = _again(schedule_of(cut.config.schedule, cut.chunks, microbatches), cut.config)
    memory = _memory(subject, config, mesh, cut.answer.profile)
    whole, resident = memory.load(schedule), memory.resident.load(cut.chunks.stages)
    pairs = zip(whole.by_stage(cut.bounds), resident.by_stage(cut.bounds), strict=True)
    return [both - stays for both, stays in pairs]
