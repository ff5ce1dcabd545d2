"""A LightningModule as anybody writes it: it knows nothing of goose-strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from goose_strategy import Goose3DStrategy, PipelineConfig
from tests.harness.models import Batch, batches, rows_of, tiny_model
from tests.harness.worker import Context

TRAIN, VALIDATE = 0, 5


class LanguageModel(pl.LightningModule):
    """Fits, validates, tests and predicts with a tiny Llama."""

    def __init__(self, dtype: torch.dtype = torch.float64, **settings: Any) -> None:
        super().__init__()
        self.model = tiny_model("llama", dtype=dtype, **settings)
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        self.log("train_loss", loss, sync_dist=True, batch_size=4)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, sync_dist=True, batch_size=4)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("test_loss", self.model(**batch).loss, sync_dist=True, batch_size=4)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits: Tensor = self.model(batch["input_ids"], batch["attention_mask"]).logits
        return logits

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Data(pl.LightningDataModule):
    """Each replica gets its rows of the global batches."""

    def __init__(self, number: int = 4) -> None:
        super().__init__()
        self.number = number

    def loader(self, number: int, seed: int) -> DataLoader[Batch]:
        assert self.trainer is not None
        place = self.trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
        rows = [
            rows_of(batch, place["rank"], place["num_replicas"])
            for batch in batches(number, seed=seed)
        ]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def train_dataloader(self) -> DataLoader[Batch]:
        return self.loader(self.number, TRAIN)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self.loader(2, VALIDATE)

    test_dataloader = predict_dataloader = val_dataloader


def make_trainer(ctx: Context, tp: int = 1, pp: int = 1, **settings: Any) -> pl.Trainer:
    """Build a quiet Trainer over all ranks."""
    pipeline = PipelineConfig(num_microbatches=2, **settings.pop("pipeline", {}))
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": ctx.world_size,
        "strategy": Goose3DStrategy(tp=tp, pp=pp, pipeline=pipeline),
        "precision": "64-true",
        "max_epochs": 1,
        "use_distributed_sampler": False,
        "default_root_dir": Path(ctx.tmp_path),
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**defaults, **settings})
