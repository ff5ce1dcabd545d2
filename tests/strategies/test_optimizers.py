"""What users see of the optimizer's precision at both doors: states, checkpoints, fp16."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch.plugins import MixedPrecision as TrainerMixedPrecision
from torch import Tensor, nn
from torch.optim import AdamW

from goose_strategy import Goose3DFabricStrategy, Goose3DStrategy, PipelineConfig, ZeroConfig
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.parity.grid import assemble
from tests.strategies.lightning_module import Data, LanguageModel
from tests.strategies.ranks import advice_ignored, good, pieces, unwrapped, world

BREAK, STEPS = 2, 4
PRESETS = ("default", "compact", "fp32")


class Run:
    """A training run in bf16-true at the Fabric door."""

    def __init__(
        self,
        ctx: Context,
        preset: str,
        mesh: tuple[int, int] = (1, 2),
        *,
        seed: int = 0,
        bucket_numel: int = 4096,
        **zero: Any,
    ) -> None:
        strategy = Goose3DFabricStrategy(
            tp=mesh[0],
            pp=mesh[1],
            pipeline=PipelineConfig(num_microbatches=2),
            zero=ZeroConfig(preset=preset, bucket_numel=bucket_numel, **zero),  # type: ignore[arg-type]
        )
        self.fabric = Fabric(
            accelerator="cpu", devices=ctx.world_size, strategy=strategy, precision="bf16-true"
        )
        self.fabric.launch()
        model = tiny_model("llama", dtype=torch.float32, tied=True, seed=seed)
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        self.model, self.optimizer = self.fabric.setup(model, optimizer)
        self.place = strategy.distributed_sampler_kwargs
        self.strategy = strategy

    def train(self, start: int, stop: int) -> None:
        for batch in batches(STEPS, batch_size=8)[start:stop]:
            loss = self.model(**rows_of(batch, self.place["rank"], self.place["num_replicas"])).loss
            self.fabric.backward(loss)
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def parameters(self) -> Any:
        return pieces(self.strategy.runtime.model_of(unwrapped(self.model)))

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def whole(self) -> dict[str, Any]:
        return self.strategy.full_optimizer_state(self.optimizer, rank0_only=False)


def _resumed(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for preset in PRESETS:
        path = ctx.tmp_path / f"{preset}.ckpt"
        unbroken = Run(ctx, preset)
        unbroken.train(0, BREAK)
        unbroken.fabric.save(path, unbroken.state())
        saved = unbroken.whole()
        unbroken.train(BREAK, STEPS)
        resumed = Run(ctx, preset, seed=1)
        resumed.fabric.load(path, resumed.state())
        loaded = resumed.whole()
        resumed.train(BREAK, STEPS)
        # In another layout, with other buckets, the state is the same, and so is a step from it.
        moved = Run(ctx, preset, (1, 1), seed=2, bucket_numel=1000)
        moved.fabric.load(path, moved.state())
        again = moved.whole()
        found[preset] = {
            "saved": saved,
            "loaded": loaded,
            "again": again,
            "end": (unbroken.parameters(), resumed.parameters()),
            "whole": (unbroken.whole(), resumed.whole()),
        }
    return found


def _changed(ctx: Context) -> dict[str, Any]:
    """Every preset reads what every other one wrote."""
    found: dict[str, Any] = {}
    for written in PRESETS:
        path = ctx.tmp_path / f"from {written}.ckpt"
        run = Run(ctx, written)
        run.train(0, BREAK)
        run.fabric.save(path, run.state())
        before = run.whole()
        for read in PRESETS:
            other = Run(ctx, read, seed=3)
            other.fabric.load(path, other.state())
            after = other.whole()
            other.train(BREAK, STEPS)
            found[f"{written} {read}"] = (before, after, other.parameters())
    return found


def _verbs(ctx: Context) -> dict[str, Any]:
    run = Run(ctx, "default", overlap_param_gather=True)
    run.train(0, 1)
    run.strategy.synchronize_parameters()
    loss = run.model(**rows_of(batches(1)[0], run.place["rank"], run.place["num_replicas"])).loss
    run.fabric.backward(loss * float("nan"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run.optimizer.step()
    local = run.optimizer.state_dict()["state"]
    return {
        "skipped": run.strategy.skipped_steps(run.optimizer),
        "local": sum(entries["exp_avg"].numel() for entries in local.values()),
        "whole": sum(e["exp_avg"].numel() for e in run.whole()["state"].values()),
    }


@pytest.fixture(scope="module")
def fabric_ranks() -> dict[str, list[Any]]:
    return world(4, _resumed, _changed, _verbs, timeout_s=120)


def assert_same_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for index, entries in theirs["state"].items():
        for key, value in entries.items():
            assert torch.equal(mine["state"][index][key], value), (index, key)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_resumes_with_the_same_bits(fabric_ranks: dict[str, list[Any]], preset: str) -> None:
    ranks = [rank[preset] for rank in good(fabric_ranks["resumed"])]
    for rank in ranks:
        assert_same_state(rank["loaded"], rank["saved"])
        assert_same_state(rank["again"], rank["saved"])
        assert_same_state(*rank["whole"])
    unbroken, resumed = (assemble([r["end"][i] for r in ranks], "parameters") for i in (0, 1))
    assert all(torch.equal(resumed[name], value) for name, value in unbroken.items())


@pytest.mark.parametrize("read", PRESETS)
@pytest.mark.parametrize("written", PRESETS)
def test_a_preset_may_change_on_the_way(
    fabric_ranks: dict[str, list[Any]], written: str, read: str
) -> None:
    before, after, _ = good(fabric_ranks["changed"])[0][f"{written} {read}"]
    bounds = {"main": 2**-9, "exp_avg": 0.04, "exp_avg_sq": 0.04, "step": 0.0, "clock": 0.0}
    for index, entries in before["state"].items():
        for key, value in entries.items():
            if key not in after["state"][index]:
                # torch's own step keeps no count of the optimizer's.
                assert (key, read) == ("clock", "fp32")
                continue
            theirs = value.double()
            gap = (after["state"][index][key].double() - theirs).norm() / theirs.norm()
            assert gap <= bounds[key], (index, key)


def test_verbs_reach_the_runtime(fabric_ranks: dict[str, list[Any]]) -> None:
    ranks = good(fabric_ranks["verbs"])
    assert [rank["skipped"] for rank in ranks] == [1] * 4
    # Tied copies are stepped on both stages, and told once.
    assert sum(rank["local"] for rank in ranks) > ranks[0]["whole"]
    model = tiny_model("llama", tied=True)
    assert ranks[0]["whole"] == sum(p.numel() for p in model.parameters())


# -- 16-mixed -----------------------------------------------------------------------------------


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def spoilt(model: nn.Module, when: list[bool]) -> None:
    """Let a gradient of the first layer be infinite whenever ``when[0]`` says so."""
    for name, param in model.named_parameters():
        if name.endswith("layers.0.mlp.down_proj.weight"):
            param.register_hook(lambda grad: grad * (float("inf") if when[0] else 1.0))


def _fabric_fp16(ctx: Context) -> tuple[list[float], list[float]]:
    strategy = Goose3DFabricStrategy(tp=1, pp=2, pipeline=PipelineConfig(num_microbatches=2))
    plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler())
    fabric = Fabric(accelerator="cpu", devices=ctx.world_size, strategy=strategy, plugins=[plugin])
    fabric.launch()
    model, when = tiny_model("llama", dtype=torch.float32), [False]
    spoilt(model, when)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    place = strategy.distributed_sampler_kwargs
    losses, scales = [], []
    for step, batch in enumerate(batches(5, batch_size=8)):
        when[0] = step == 3
        loss = model(**rows_of(batch, place["rank"], place["num_replicas"])).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(plugin.scaler.get_scale())
    return losses, scales


class Spoilt(LanguageModel):
    """One whose gradient is infinite in the third step."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.when = [False]
        self.scales: list[float] = []
        spoilt(self.model, self.when)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.when[0] = batch_idx == 3

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def _trainer_fp16(ctx: Context) -> tuple[list[float], list[float]]:
    strategy = Goose3DStrategy(tp=1, pp=2, pipeline=PipelineConfig(num_microbatches=2))
    plugin = TrainerMixedPrecision("16-mixed", device="cpu", scaler=scaler())
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ctx.world_size,
        strategy=strategy,
        plugins=[plugin],
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    module = Spoilt()
    with advice_ignored():
        trainer.fit(module, datamodule=Data(5))
    return module.losses, module.scales


@pytest.fixture(scope="module")
def fp16_ranks() -> dict[str, list[Any]]:
    return world(2, _fabric_fp16, _trainer_fp16)


def scales_of_torch() -> list[float]:
    """The same in one process, by torch alone."""
    weight = nn.Parameter(torch.ones(1))
    own, optimizer, scales = scaler(), AdamW([weight]), []
    for step in range(5):
        loss: Tensor = weight.sum() * (float("inf") if step == 3 else 1.0)
        own.scale(loss).backward()
        own.unscale_(optimizer)
        own.step(optimizer)
        own.update()
        optimizer.zero_grad()
        scales.append(own.get_scale())
    return scales


@pytest.mark.parametrize("door", ["fabric_fp16", "trainer_fp16"])
def test_fp16_scales_and_skips_as_torch_does(fp16_ranks: dict[str, list[Any]], door: str) -> None:
    expected = scales_of_torch()
    assert len(set(expected)) == 2
    for losses, scales in good(fp16_ranks[door]):
        assert scales == expected
        assert losses == good(fp16_ranks[door])[0][0]
        assert all(loss == loss for loss in losses)
        assert losses[-1] < losses[0]
