"""Every contender trains the same global batches, however they are split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR

from goose_strategy.bench import workload
from goose_strategy.bench.job import Job
from goose_strategy.errors import BatchError, ConfigError

MODULE = """\
import lightning as L
import torch
from torch.utils.data import DataLoader

class Line(L.LightningModule):
    def __init__(self, width: int = 3):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)
    def training_step(self, batch):
        return self.layer(batch["x"]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Numbers(L.LightningDataModule):
    def prepare_data(self):
        with open("prepared", "a") as file:
            file.write("x")
    def setup(self, stage):
        self.rows = [{"x": torch.full((4,), float(i))} for i in range(6)]
    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=2)
"""


def test_a_global_batch_is_one_batch_per_replica() -> None:
    loader = [{"x": torch.tensor([[index]])} for index in range(5)]
    batches = workload.global_batches(loader, 3, 2)
    # The data start again when they end.
    assert [batch["x"].flatten().tolist() for batch in batches] == [[0, 1], [2, 3], [4, 0]]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((torch.zeros(2, 4),), "batch 0 is a tuple"),
        ({"x": 3}, "batch 0 is a dict"),
        ({"x": torch.zeros(())}, "batch 0 is a dict"),
    ],
)
def test_batches_that_cannot_be_split_are_refused(part: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        workload.global_batches([part, part], 1, 2)


def test_ragged_batches_are_refused() -> None:
    loader = [{"x": torch.zeros(2, 4)}, {"x": torch.zeros(2, 5)}]
    with pytest.raises(BatchError, match="different shapes"):
        workload.global_batches(loader, 1, 2)


def test_shares_make_up_the_batch() -> None:
    batch = {"x": torch.arange(12).view(6, 2), "y": torch.arange(6)}
    parts = [workload.share(batch, rank=rank, replicas=3) for rank in range(3)]
    for key, value in batch.items():
        assert torch.equal(torch.cat([part[key] for part in parts]), value)


def test_uneven_shares_are_refused() -> None:
    with pytest.raises(BatchError, match=r"6 rows.*4 replicas.*multiple of 4"):
        workload.share({"x": torch.zeros(6, 2)}, rank=0, replicas=4)


def test_optimizers_are_unpacked() -> None:
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    schedule = ConstantLR(optimizer)
    entry = {"scheduler": schedule, "interval": "step"}
    for configured, schedules in (
        (optimizer, []),
        ([optimizer], []),
        ({"optimizer": optimizer}, []),
        ({"optimizer": optimizer, "lr_scheduler": schedule}, [schedule]),
        ({"optimizer": optimizer, "lr_scheduler": entry}, [schedule]),
        (([optimizer], [entry]), [schedule]),
        (([optimizer], [schedule]), [schedule]),
    ):
        assert workload.single_optimizer(configured) == (optimizer, schedules)
    with pytest.raises(ConfigError, match="exactly one optimizer"):
        workload.single_optimizer([optimizer, optimizer])
    with pytest.raises(ConfigError, match="NoneType"):
        workload.single_optimizer(None)


def test_a_recipe_is_built_without_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bench_toy.py").write_text(MODULE)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {class_path: bench_toy.Line, init_args: {width: 4}}\n"
        "data: {class_path: bench_toy.Numbers}\n"
        "trainer: {devices: 64, strategy: no_such_strategy}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    job = Job(config=str(recipe), replicas=3, steps=1, warmup=1)
    workload.prepare(job)
    assert (tmp_path / "prepared").read_text() == "x"
    work = workload.build(job)
    assert work.module.layer.in_features == 4  # type: ignore[union-attr]
    assert [batch["x"].shape for batch in work.batches] == [(6, 4), (6, 4)]
    assert (tmp_path / "prepared").read_text() == "x"


def test_the_built_in_work_is_drawn_from_the_seed() -> None:
    first, again, other = (
        workload.skewed_batches(2, (4, 8), 64, seed=seed)[0]["input_ids"] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    ids = workload.skewed_batches(1, (64, 64), 64, seed=1)[0]["input_ids"]
    assert ids.min() >= 0
    assert ids.max() < 64
    assert (ids == 0).float().mean() > 0.3  # 1/64 if they were uniform
