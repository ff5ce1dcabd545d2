"""The quickstart's model and text in a plain Fabric loop.

    python recipes/fabric_causal_lm.py                              # Fabric starts 8 processes
    torchrun --nproc-per-node=8 recipes/fabric_causal_lm.py         # or torchrun does
    python recipes/fabric_causal_lm.py --tp=4 --pp=1 --devices=4    # another layout

The losses are those of ``goose3d fit --config recipes/quickstart.yaml``, step by step.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse import auto_cli
from lightning import Fabric
from lightning.fabric.loggers import CSVLogger
from lm import LlamaSize, StdlibText, build_llama, build_optimizer

from goose_strategy import Goose3DFabricStrategy, PipelineConfig
from goose_strategy.strategies.progress import TokenMeter


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line can change, with the quickstart's values."""

    tp: int = 2
    pp: int = 2
    num_microbatches: int = 4
    accelerator: str = "cpu"
    devices: int = 8
    batch_size: int = 8  # rows per data-parallel replica
    max_steps: int = 200
    log_every: int = 10
    folder: str = "runs/fabric_causal_lm"
    data_folder: str = "runs/quickstart/data"
    size: LlamaSize = field(default_factory=LlamaSize)


def main(settings: Settings) -> None:
    folder = Path(settings.folder)
    fabric = Fabric(
        accelerator=settings.accelerator,
        devices=settings.devices,
        strategy=Goose3DFabricStrategy(
            tp=settings.tp,
            pp=settings.pp,
            pipeline=PipelineConfig(schedule="1F1B", num_microbatches=settings.num_microbatches),
        ),
        loggers=CSVLogger(root_dir=folder.parent, name=folder.name, flush_logs_every_n_steps=1),
    )
    fabric.launch()
    fabric.seed_everything(1, workers=True)

    text = StdlibText(
        settings.data_folder, settings.size.vocab_size, batch_size=settings.batch_size
    )
    with fabric.rank_zero_first(local=True):
        text.prepare_data()
    text.setup("fit")
    loader = fabric.setup_dataloaders(text.train_dataloader())

    model = build_llama(settings.size)
    optimizer, schedule = build_optimizer(model, rate=2e-3, warmup=30)
    model, optimizer = fabric.setup(model, optimizer)
    model.train()

    meter, replicas = TokenMeter(), fabric.strategy.data_parallel_size
    meter.resume(time.perf_counter())
    for step, batch in enumerate(itertools.islice(loader, settings.max_steps)):
        loss = model(**batch).loss  # runs the whole pipeline schedule; equal on every rank
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

        meter.add(batch["input_ids"].numel() * replicas, time.perf_counter())
        if (step + 1) % settings.log_every == 0:
            fabric.log("loss", loss, step)
            speed = f"{meter.tokens_per_second or 0:,.0f} tok/s"
            fabric.print(f"step {step + 1:4d}  loss {loss.item():.4f}  {speed}", flush=True)

    checkpoint = folder / "checkpoint"
    fabric.save(checkpoint, {"model": model, "optimizer": optimizer, "steps": settings.max_steps})
    fabric.print(f"checkpoint {checkpoint}")


if __name__ == "__main__":
    main(auto_cli(Settings))
