"""One data order, every way in: Fabric, the Trainer, torchrun's environment, a script by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from goose_strategy import ParallelRuntime, PipelineConfig, RuntimeConfig
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import ROOT, Context
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.ranks import good, make_fabric, world

STEPS = 4


def optimizers(model: Any) -> Any:
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return optimizer, StepLR(optimizer, 2, 0.5)


def _torch_alone(ctx: Context) -> list[float]:
    """No Lightning: the loop that the runtime's docstring shows."""
    dist.init_process_group("gloo")  # from the variables that torchrun sets
    runtime = ParallelRuntime(
        RuntimeConfig(tp=2, pp=2, pipeline=PipelineConfig(num_microbatches=2))
    )
    runtime.start(torch.device("cpu"))
    model = tiny_model("llama", dtype=torch.float32)
    optimizer, scheduler = optimizers(model)
    runtime.shard_module(model, optimizers=[optimizer])
    losses = []
    for batch in batches(STEPS):
        loss = model(**rows_of(batch, runtime.mesh.dp_rank, runtime.mesh.dp_size)).loss
        with runtime.backward(loss):
            loss.backward()
        runtime.clip_grad_norm(optimizer, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    runtime.stop()
    return losses


def _fabric(ctx: Context) -> list[float]:
    fabric = make_fabric(ctx, 2, 2, precision="32-true")
    model = tiny_model("llama", dtype=torch.float32)
    optimizer, scheduler = optimizers(model)
    model, optimizer = fabric.setup(model, optimizer)
    place = fabric.strategy.distributed_sampler_kwargs
    losses = []
    for batch in batches(STEPS):
        loss = model(**rows_of(batch, place["rank"], place["num_replicas"])).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _trainer(ctx: Context) -> list[float]:
    module = LanguageModel(torch.float32)
    trainer = make_trainer(ctx, 2, 2, precision="32-true", gradient_clip_val=1.0)
    trainer.fit(module, datamodule=Data(STEPS))
    return module.losses


def test_every_way_in_has_the_same_losses() -> None:
    results = world(8, _torch_alone, _fabric, _trainer)
    expected = good(results["torch_alone"])[0]
    assert len(expected) == STEPS
    assert len(set(expected)) == STEPS
    for name, ranks in results.items():
        assert good(ranks) == [expected] * 8, name


# -- scripts that start their own processes -----------------------------------------------------

COMMON = """
    import sys
    import torch
    from goose_strategy import Goose3DFabricStrategy, Goose3DStrategy, PipelineConfig
    from tests.harness.models import batches, tiny_model
    torch.set_num_threads(1)
    pipeline = PipelineConfig(num_microbatches=2)
"""
FABRIC = """
    from lightning.fabric import Fabric
    strategy = Goose3DFabricStrategy(pp=2, pipeline=pipeline)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = tiny_model("llama", dtype=torch.float32)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for batch in batches(3):
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    fabric.print("LOSSES", losses)
"""
TRAINER = """
    import lightning.pytorch as pl
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tiny_model("llama", dtype=torch.float32)
            self.losses = []
        def training_step(self, batch):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)
    module = Module()
    loader = torch.utils.data.DataLoader(batches(3), batch_size=None)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=Goose3DStrategy(pp=2, pipeline=pipeline),
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        print("LOSSES", module.losses)
"""


@pytest.mark.timeout(180)
def test_a_script_starts_its_own_ranks_and_ends_in_silence(tmp_path: Path) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    running = []
    for name, body in (("fabric", FABRIC), ("trainer", TRAINER)):
        script = tmp_path / f"train_{name}.py"
        script.write_text(textwrap.dedent(COMMON) + textwrap.dedent(body), encoding="utf-8")
        running.append(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(script)],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    printed = []
    for process in running:
        out, err = process.communicate(timeout=160)
        assert process.returncode == 0, err
        printed += [line for line in out.splitlines() if line.startswith("LOSSES")]
        # Lightning says who joins, and what it found, and we how the model is cut; nothing speaks
        # after the end.
        last = err.strip().splitlines()[-1] if err.strip() else ""
        for word in ("Error", "Traceback", "goose-strategy:", "destroy_process_group", "leaked"):
            assert word not in err, err
        table = re.fullmatch(r" +1 +1 +2-3 .*MiB +-", last)
        assert "`Trainer.fit` stopped" in last or table or set(last) <= {"-"}, err
    assert len(printed) == 2
    assert printed[0] == printed[1]
