"""Lightning starts inside isolated ranks, as under ``torchrun``, with warnings as errors."""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness.worker import Context
from tests.harness.world import run_ranks


def _fabric_mean(ctx: Context) -> tuple[int, int, float]:
    fabric = L.Fabric(accelerator="cpu", devices=ctx.world_size, strategy="ddp")
    fabric.launch()
    model = nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.full((1, 2), float(ctx.rank))).sum())
    optimizer.step()
    return fabric.global_rank, fabric.world_size, model.weight.grad[0, 0].item()


def test_fabric_starts() -> None:
    assert run_ranks(_fabric_mean, 2, isolated=True) == [(0, 2, 0.5), (1, 2, 0.5)]


class _Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss = self.layer(batch[0]).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def _trainer_fits(ctx: Context) -> tuple[int, int]:
    data = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ctx.world_size,
        strategy="ddp",
        max_epochs=1,
        default_root_dir=ctx.tmp_path,
        log_every_n_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Model(), data)
    return trainer.global_rank, trainer.global_step


def test_the_trainer_starts() -> None:
    assert run_ranks(_trainer_fits, 2, isolated=True) == [(0, 2), (1, 2)]
