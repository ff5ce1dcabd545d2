"""A rank measures every step, and goose3d, ddp and one process train on the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning import Fabric

from goose_strategy.bench import worker, workload, world
from goose_strategy.bench.job import Job

RECIPE = """\
model: {class_path: bench_tiny.Tiny}
data: {class_path: bench_tiny.Tokens}
"""
MODULE = """\
import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, use_cache=False))
    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss)
        return {"loss": loss}
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

class Tokens(L.LightningDataModule):
    def train_dataloader(self):
        ids = torch.arange(64).remainder(7).view(8, 8)
        return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "bench_tiny.py").write_text(MODULE)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    monkeypatch.syspath_prepend(tmp_path)
    return str(path)


def test_every_step_is_measured(recipe: str) -> None:
    job = Job(contender="single", devices=1, config=recipe, replicas=2, steps=2, clip=0.5)
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(job.seed)
    found = worker.measure(fabric, workload.build(job), job)
    assert len(found["ends"]) == len(found["cpu"]) == len(found["losses"]) == 5
    assert found["ends"] == sorted(found["ends"])
    assert found["losses"][-1] < found["losses"][0]
    assert found["tokens"] == 2 * 2 * 8
    assert 50 < found["peak_mib"] < 50_000


def test_the_peak_is_of_what_comes_after() -> None:
    large = torch.ones(40 * 2**20 // 4)  # 40 MiB
    del large
    memory = worker.PeakMemory(torch.device("cpu"))
    before = memory.peak_mib()
    kept = torch.ones(60 * 2**20 // 4)
    assert memory.peak_mib() - before > 50
    assert kept[0] == 1


@pytest.mark.recipes
@pytest.mark.timeout(180)
@pytest.mark.parametrize("contender", ["ddp", "goose3d"])
def test_contenders_agree_with_one_process(recipe: str, contender: str) -> None:
    job = Job(config=recipe, replicas=1, steps=2, warmup=2, strategy={"pp": 2})
    single = workload_losses(job)
    run = world.run(
        Job(**{**vars(job), "contender": contender, "devices": 2}),
        timeout_s=150,
    )
    assert run.losses == pytest.approx(single, rel=1e-5)
    assert len(run.step_ms) == 2


def workload_losses(job: Job) -> list[float]:
    """Return the losses of one process, as the worker's main would measure them."""
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(job.seed, workers=True, verbose=False)
    losses: list[float] = worker.measure(fabric, workload.build(job), job)["losses"]
    return losses
