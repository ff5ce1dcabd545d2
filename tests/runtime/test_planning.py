"""Rank 0 decides, all ranks follow, and what was decided is told once."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from goose_strategy.errors import PlanError
from goose_strategy.hub.pretrained import from_pretrained
from goose_strategy.hub.twin import runnable_twin
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.profile import Cost, Profile
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE
from goose_strategy.runtime import planning
from goose_strategy.runtime.planning import LOGGER, Subject, plan_pipeline, resident_bytes
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.hub.checkpoints import save
from tests.runtime.start import mesh_of, message

MS = 1_000_000


def subject(**settings: Any) -> Subject:
    model = tiny_model("llama", layers=8, **settings)
    return Subject(model, model, probe_model(model))


def config(**pipeline: Any) -> RuntimeConfig:
    return RuntimeConfig(pp=2, pipeline=PipelineConfig(**pipeline))


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def measured_by(rank: int) -> Profile:
    """Another one on every rank: on rank 0 the first layers are slow, on others the last ones."""
    costs = [Cost(10 * MS, 10 * MS, 10 * MS, 1_000_000)] * 2 + [Cost(MS, MS, MS, 1_000_000)] * 6
    if rank > 0:
        costs.reverse()
    return Profile((1, 8), Cost(), tuple(costs), Cost(), hidden=10, shared=0)


def _plans(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    lines = _Lines()
    LOGGER.addHandler(lines)
    LOGGER.setLevel(logging.INFO)
    measured: list[bool] = []

    def measure(_model: nn.Module, _info: Any, sample: Any) -> Profile:
        measured.append(sample.timed)
        return measured_by(ctx.rank)

    try:
        with mesh_of(pp=2) as mesh, patch.object(planning, "measure", measure):
            for name, settings in {
                "balanced": {},
                "uniform": {"partition": "uniform"},
                "listed": {"partition": [6, 2]},
                "time": {"partition": "time"},
                "memory": {"partition": "memory", "num_microbatches": 4},
                "v": {"partition": "time", "schedule": "ZBVZeroBubble"},
                "auto": {"schedule": "auto", "num_microbatches": 8},
                "compiled": {"schedule": "auto", "num_microbatches": 8, "compile_layers": True},
            }.items():
                lines.lines.clear()
                measured.clear()
                plan = plan_pipeline(subject(), config(**settings), mesh)
                found[name] = (plan, list(lines.lines), list(measured))
    finally:
        LOGGER.removeHandler(lines)
        LOGGER.setLevel(logging.NOTSET)
    return found


@pytest.fixture(scope="module")
def plans() -> list[dict[str, Any]]:
    return run_ranks(_plans, 2)


def test_all_ranks_have_one_plan_and_rank_0_tells_it(plans: list[dict[str, Any]]) -> None:
    first, second = plans
    for name, (plan, lines, _) in first.items():
        assert plan == second[name][0]
        assert lines == [str(plan.report)]
        assert second[name][1] == []


def test_only_rank_0_measures_and_only_where_that_matters(plans: list[dict[str, Any]]) -> None:
    assert {name: measured for name, (_, _, measured) in plans[0].items()} == {
        "balanced": [],
        "uniform": [],
        "listed": [],
        "time": [True],
        "memory": [False],
        "v": [True],
        "auto": [True],
        "compiled": [True],
    }
    assert not any(measured for _, _, measured in plans[1].values())


def test_layers_go_where_they_are_asked_to(plans: list[dict[str, Any]]) -> None:
    bounds = {name: plan.bounds for name, (plan, _, _) in plans[0].items()}
    assert bounds["balanced"] == (0, 4, 8)
    assert bounds["uniform"] == (0, 4, 8)
    assert bounds["listed"] == (0, 6, 8)
    # Two layers of 30 ms and six of 3.
    assert bounds["time"] == (0, 1, 8)
    # The first stage holds two microbatches at once, the second one.
    assert bounds["memory"] == (0, 3, 8)
    report = plans[0]["time"][0].report
    assert [stage.time for stage in report.stages] == [30 * MS, 48 * MS]
    assert report.imbalance == pytest.approx(48 / 39)
    v = plans[0]["v"][0]
    assert v.chunks.stages == 4
    assert max(v.report.imbalance, 1.15) == 1.15


def test_the_choice_takes_the_place_of_auto(plans: list[dict[str, Any]]) -> None:
    plan, lines, _ = plans[0]["auto"]
    assert plan.config.schedule in CATALOGUE
    assert plan.config.stages_per_rank == plan.chunks.per_rank
    assert plan.config.chunks(2) == plan.chunks
    (text,) = lines
    assert text.startswith("  schedule")
    assert f"* {plan.config.schedule}, 8 microbatches" in text
    assert all(name in text for name in CATALOGUE)
    compiled, lines, _ = plans[0]["compiled"]
    assert not CATALOGUE[compiled.config.schedule].splits
    assert "ZBH1" not in lines[0]


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        ([None, None], None),
        ([(80, "a"), (90, "b")], 80),
        ([(80, "a"), (78, "a"), (80, "a"), (80, "a")], 19),
        ([(80, "a"), (80, "a"), (30, "b"), None], 30),
    ],
)
def test_ranks_on_one_card_share_its_memory(ranks: list[Any], share: int | None) -> None:
    assert planning.smallest_share(ranks) == share


def _failing(ctx: Context) -> list[str]:
    def measure(*_: Any) -> Profile:
        raise PlanError("no memory for this")

    found = []
    with mesh_of(pp=2) as mesh:
        with patch.object(planning, "measure", measure):
            ask = config(partition="time")
            found.append(message(lambda: plan_pipeline(subject(), ask, mesh), PlanError))
        tight = config(schedule="auto", memory_limit_bytes=1000)
        found.append(message(lambda: plan_pipeline(subject(), tight, mesh), PlanError))
        many = config(schedule="Interleaved1F1B", stages_per_rank=5)
        found.append(message(lambda: plan_pipeline(subject(), many, mesh), PlanError))
        own = [3 + 2 * ctx.rank, 5 - 2 * ctx.rank]
        differs = replace(config(), pipeline=PipelineConfig(partition=own))
        found.append(message(lambda: plan_pipeline(subject(), differs, mesh), PlanError))
    return found


def test_all_ranks_refuse_alike() -> None:
    for failed, tight, many, differs in run_ranks(_failing, 2):
        assert "no memory for this" in failed
        assert "memory_limit_bytes=1000 is less than every candidate needs" in tight
        assert "pp=2 x 5 stages per rank = 10 is more than the model's 8 layers" in many
        assert "different things as the plan of the pipeline" in differs


def _unread(ctx: Context, path: Path) -> list[Any]:
    with mesh_of(pp=2) as mesh:
        model = from_pretrained(path)
        twin = runnable_twin(model, mesh.device)
        info = probe_model(twin)
        unread = plan_pipeline(Subject(model, twin, info), config(partition="memory"), mesh)
        assert all(param.is_meta for param in model.parameters())
        timed = plan_pipeline(Subject(model, twin, info), config(partition="time"), mesh)
        return [unread.report, timed.report.stages[0].time]


def test_a_model_that_was_not_read_is_measured_on_layers_of_its_own(tmp_path: Path) -> None:
    path = save(tmp_path, "llama")
    (report, time), other = run_ranks(_unread, 2, path)
    assert report == other[0]
    assert time == other[1] > 0
    assert all(stage.activations for stage in report.stages)


@pytest.mark.parametrize(
    ("dtype", "trained", "tp", "dp", "per_parameter"),
    [
        (torch.bfloat16, True, 1, 1, 6 + 12),
        (torch.bfloat16, True, 1, 4, 6 + 12 / 4),
        (torch.float32, True, 1, 2, 8 + 8 / 2),
        (torch.float64, True, 1, 2, 16 + 16 / 2),
        (torch.bfloat16, True, 2, 1, (6 + 12) / 2),
        (torch.bfloat16, False, 1, 4, 2),
    ],
)
def test_bytes_that_stay(
    dtype: torch.dtype, trained: bool, tp: int, dp: int, per_parameter: float
) -> None:
    mesh: Any = SimpleNamespace(tp_size=tp, dp_size=dp)
    matrix = nn.Parameter(torch.zeros(4, 4, dtype=dtype), requires_grad=trained)
    assert resident_bytes(mesh)(matrix) == 16 * per_parameter
    # Norms and biases are whole on every tp rank.
    vector = nn.Parameter(torch.zeros(8, dtype=dtype), requires_grad=trained)
    assert resident_bytes(mesh)(vector) == 8 * per_parameter * tp


def test_a_row_of_512_tokens_is_measured_or_what_is_asked_for() -> None:
    shape = planning._example_shape
    model = tiny_model("llama")
    assert shape(model, PipelineConfig()) == (1, 128)
    assert shape(nn.Linear(1, 1), PipelineConfig()) == (1, 512)
    assert shape(model, PipelineConfig(example_shape=(4, 2048))) == (4, 2048)
