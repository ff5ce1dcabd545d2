"""Low-rank adapters through both doors: trained, saved alone, loaded elsewhere, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from goose_strategy.checkpoint.load import open_checkpoint
from tests.harness.models import batches, rows_of
from tests.harness.worker import Context
from tests.parity.grid import Case, assemble
from tests.parity.lora import LoraCase
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.ranks import good, make_fabric, pieces, unwrapped, world

CASE = LoraCase(targets=("q_proj", "down_proj", "lm_head"))
ELSEWHERE = [(1, 1), (4, 1), (1, 4), (2, 1), (2, 4)]


def only_adapters(name: str, _value: Any) -> bool:
    return "lora_" in name


def set_up(ctx: Context, tp: int, pp: int, *, seed: int = 0) -> Any:
    """Return Fabric, the model, its handle and its optimizer; the seed is the adapters'."""
    fabric = make_fabric(ctx, tp, pp)
    model = CASE.model()
    if seed:
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "lora_" in name:
                    param.add_(seed)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    wrapped, optimizer = fabric.setup(model, optimizer)
    runtime = fabric.strategy.runtime
    return fabric, wrapped, runtime.model_of(unwrapped(wrapped)), optimizer


def _trained(ctx: Context) -> dict[str, Any]:
    fabric, model, handle, optimizer = set_up(ctx, 2, 2)
    place = fabric.strategy.distributed_sampler_kwargs
    losses = []
    for batch in batches(3, batch_size=8):
        loss = model(**rows_of(batch, place["rank"], place["num_replicas"])).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    path = ctx.tmp_path / "adapter.ckpt"
    fabric.save(path, {"model": model}, filter={"model": only_adapters})
    everything = ctx.tmp_path / "all.ckpt"
    fabric.save(everything, {"model": model, "optimizer": optimizer})
    fabric.strategy.export_adapter(model, ctx.tmp_path / "peft")
    opened = open_checkpoint(path, mesh=handle.mesh)
    resumable = open_checkpoint(everything, mesh=handle.mesh)
    bucketed = {slot.name for bucket in handle.reducer.buckets for slot in bucket.slots}
    found = {
        "losses": losses,
        "trained": pieces(handle),
        "saved": sorted(opened.tensors),
        "states": sorted({t.path[2] for t in resumable.tensors.values() if len(t.path) == 4}),
        "bucketed": bucketed,
        "adapter": {file.name: file.read_bytes() for file in (ctx.tmp_path / "peft").iterdir()},
        "elsewhere": [],
    }
    for tp, pp in ELSEWHERE:
        fabric, model, handle, optimizer = set_up(ctx, tp, pp, seed=5)
        fabric.load(path, {"model": model}, strict=False)
        alone = pieces(handle)
        fabric, model, handle, optimizer = set_up(ctx, tp, pp, seed=5)
        fabric.load(everything, {"model": model, "optimizer": optimizer})
        found["elsewhere"].append((alone, pieces(handle)))
    return found


class Adapted(LanguageModel):
    """A LightningModule around a ``PeftModel``."""

    def __init__(self) -> None:
        super().__init__()
        self.model = CASE.model()

    def configure_optimizers(self) -> Any:
        return AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def _fitted(ctx: Context) -> dict[str, Any]:
    trainer = make_trainer(ctx, 2, 2)
    module = Adapted()
    trainer.fit(module, datamodule=Data())
    strategy: Any = trainer.strategy
    strategy.export_adapter(module, ctx.tmp_path / "peft")
    handle = strategy.runtime.model_of(module)
    folder = ctx.tmp_path / "peft"
    return {
        "losses": module.losses,
        "trained": pieces(handle),
        "adapter": {file.name: file.read_bytes() for file in folder.iterdir()},
    }


@pytest.fixture(scope="module")
def fabric_ranks() -> list[Any]:
    return good(world(8, _trained)["trained"])


def whole_of(ranks: list[Any], prefix: str = "") -> dict[str, Tensor]:
    found = assemble([rank["trained"] for rank in ranks], "parameters")
    return {name.removeprefix(prefix): value for name, value in found.items()}


def reloaded(files: dict[str, bytes], folder: Path) -> Any:
    """Load an exported adapter with peft alone."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return peft.PeftModel.from_pretrained(Case.model(CASE), str(folder))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    (batch,) = batches(1)
    found: Tensor = model.eval()(input_ids=batch["input_ids"]).logits
    return found


def test_only_the_adapter_is_saved_when_asked(fabric_ranks: list[Any]) -> None:
    trained = {f"model.{n}" for n, p in CASE.model().named_parameters() if p.requires_grad}
    for rank in fabric_ranks:
        # AutoModel's issue 3096: only the first stage's adapter was in the file.
        assert set(rank["saved"]) == trained


def test_what_is_frozen_has_neither_bucket_nor_state(fabric_ranks: list[Any]) -> None:
    trained = {n for n, p in CASE.model().named_parameters() if p.requires_grad}
    assert set().union(*(rank["bucketed"] for rank in fabric_ranks)) == trained
    assert set(fabric_ranks[0]["states"]) == trained


@pytest.mark.parametrize("index", range(len(ELSEWHERE)), ids=[str(e) for e in ELSEWHERE])
def test_an_adapter_alone_loads_at_any_layout(fabric_ranks: list[Any], index: int) -> None:
    expected = whole_of(fabric_ranks)
    for kind in (0, 1):
        found = assemble([r["elsewhere"][index][kind] for r in fabric_ranks], "parameters")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_fabrics_door_exports_what_it_trained(fabric_ranks: list[Any], tmp_path: Path) -> None:
    expected = CASE.model()
    before = logits(expected)
    expected.load_state_dict(whole_of(fabric_ranks))
    found = logits(reloaded(fabric_ranks[0]["adapter"], tmp_path / "peft"))
    assert torch.equal(found, logits(expected))
    assert not torch.equal(found, before)


def test_the_trainers_door_trains_and_exports_the_same(tmp_path: Path) -> None:
    ranks = good(world(4, _fitted)["fitted"])
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
    expected = CASE.model()
    expected.load_state_dict(whole_of(ranks, "model."))
    found = reloaded(ranks[0]["adapter"], tmp_path / "peft")
    assert torch.equal(logits(found), logits(expected))
