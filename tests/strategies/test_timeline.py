"""The recorder works through both doors, on real ranks, and what it writes is drawn."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from goose_strategy import Goose3DFabricStrategy, PipelineConfig, TimelineRecorder
from goose_strategy.bench.chart import make_chart
from goose_strategy.bench.recording import load
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.ranks import good, make_fabric, world


def _in_fabric(ctx: Context) -> Any:
    folder = ctx.tmp_path / "fabric"
    strategy = Goose3DFabricStrategy(pp=2, pipeline=PipelineConfig(num_microbatches=3))
    fabric = Fabric(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        precision="64-true",
        callbacks=[TimelineRecorder(str(folder), steps=2, skip=1)],
    )
    fabric.launch()
    model = fabric.setup(tiny_model("llama"))
    mesh = fabric.strategy.runtime.mesh
    for batch in batches(4, batch_size=6):
        rows = rows_of(batch, mesh.dp_rank, mesh.dp_size)
        fabric.backward(model(**rows).loss)
        model.zero_grad()
    fabric.barrier()
    return summary(folder)


def _in_the_trainer(ctx: Context) -> Any:
    """Two batches are fewer than were asked for: the end of the fit writes what there is."""
    folder = ctx.tmp_path / "trainer"
    recorder = TimelineRecorder(str(folder), steps=9, skip=1)
    trainer = make_trainer(ctx, 2, 2, callbacks=[recorder])
    trainer.fit(LanguageModel(), datamodule=Data(3))
    trainer.strategy.barrier()
    return summary(folder)


def _without_a_pipeline(ctx: Context) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fabric = make_fabric(ctx, 2, 1)
        recorder = TimelineRecorder(str(ctx.tmp_path / "none"))
        recorder.on_after_setup(fabric, None)
        trainer = make_trainer(ctx, 4, 1, callbacks=[recorder])
        recorder.setup(trainer, LanguageModel(), "fit")
    return [str(one.message) for one in caught if "TimelineRecorder" in str(one.message)]


def summary(folder: Path) -> dict[str, Any]:
    recording = load(folder)
    chart = make_chart(recording)
    return {
        "steps": recording.steps,
        "rows": [(row.rank, row.pp, row.dp, row.tp) for row in recording.rows],
        "work": [len(row.work) for row in recording.rows],
        "bubble": recording.bubble,
        "least": recording.least_bubble,
        "late": [message.taken - message.sent for message in chart.messages],
    }


@cache
def results() -> dict[str, list[Any]]:
    return world(4, _in_fabric, _in_the_trainer, _without_a_pipeline)


def check(told: dict[str, Any], microbatches: int) -> None:
    assert told["work"] == [2 * microbatches] * 4
    assert 0 < told["least"] <= told["bubble"] < 1
    # Both directions of both pipelines: no message is taken before it was sent, on any clock.
    assert len(told["late"]) == 2 * 2 * microbatches
    assert min(told["late"]) > 0


def test_fabric_records_every_rank() -> None:
    for told in good(results()["in_fabric"]):
        assert told["steps"] == (1, 2)
        assert [row[1:] for row in told["rows"]] == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)]
        check(told, 3)


def test_the_trainer_records_and_closes() -> None:
    for told in good(results()["in_the_trainer"]):
        assert told["steps"] == (1, 2)
        assert [row[1:] for row in told["rows"]] == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)]
        check(told, 2)


def test_one_rank_says_that_nothing_is_recorded() -> None:
    told = good(results()["without_a_pipeline"])
    assert [len(messages) for messages in told] == [2, 0, 0, 0]
    assert "Set pp > 1 in goose3d's strategy" in told[0][0]
