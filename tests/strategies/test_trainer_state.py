"""``ckpt_path``: a resumed fit goes on as if nothing had happened; the folder consolidates."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from goose_strategy.strategies import trainer_state
from tests.harness.models import batches, tiny_model
from tests.harness.worker import Context
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.ranks import Raised, advice_ignored, attempt, good, same_error, world


class Plain(LanguageModel):
    """With dropout, a hyperparameter, a state of its own and a batch counter."""

    def __init__(self, seed: int = 0, **settings: Any) -> None:
        super().__init__(torch.float32, seed=seed, attention_dropout=0.2, **settings)
        self.save_hyperparameters()
        self.note = ""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = "mine"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


def own(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def fit(ctx: Context, tp: int, pp: int, module: Plain, **settings: Any) -> pl.Trainer:
    path = settings.pop("ckpt_path", None)
    callbacks = settings.pop("callbacks", [])
    trainer = make_trainer(
        ctx, tp, pp, callbacks=callbacks, enable_checkpointing=bool(callbacks), **settings
    )
    with advice_ignored():  # to give the new Trainer the old one's ModelCheckpoint, too
        trainer.fit(module, datamodule=Data(), ckpt_path=path)
    return trainer


def _interrupted(ctx: Context, precision: str) -> dict[str, Any]:
    keep = ModelCheckpoint(
        ctx.tmp_path / precision, filename="{epoch}", every_n_epochs=1, save_top_k=-1
    )
    unbroken = Plain()
    fit(ctx, 2, 2, unbroken, precision=precision, max_epochs=3, callbacks=[keep])
    torch.manual_seed(ctx.rank)
    resumed = Plain(seed=1)
    path = ctx.tmp_path / precision / "epoch=1.ckpt"
    trainer = fit(ctx, 2, 2, resumed, precision=precision, max_epochs=3, ckpt_path=path)
    return {
        "losses": (unbroken.losses[8:], resumed.losses),
        "parameters": (own(unbroken), own(resumed)),
        "note": resumed.note,
        "steps": trainer.global_step,
        "rates": trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
    }


def _interrupted_in_fp32(ctx: Context) -> dict[str, Any]:
    return _interrupted(ctx, "32-true")


def _interrupted_in_bf16(ctx: Context) -> dict[str, Any]:
    return _interrupted(ctx, "bf16-true")


def _elsewhere(ctx: Context) -> dict[str, Any]:
    """The checkpoint in plain torch, in another layout, and from a single file."""
    keep = ModelCheckpoint(ctx.tmp_path / "kept", save_last=True)
    module = Plain()
    fit(ctx, 2, 2, module, precision="32-true", callbacks=[keep])
    path = ctx.tmp_path / "kept" / "last.ckpt"
    whole = _load_distributed_checkpoint(path)
    plain = tiny_model("llama", dtype=torch.float32, seed=3).eval()
    plain.load_state_dict({k.removeprefix("model."): v for k, v in whole["model"].items()})
    batch = {k: v for k, v in batches(1)[0].items() if k != "labels"}
    single = ctx.tmp_path / f"single{ctx.rank}.ckpt"
    torch.save(
        {**{k: whole[k] for k in whole if k != "model"}, "state_dict": whole["model"]}, single
    )
    module.eval()
    with torch.no_grad():
        logits = [module.model(**batch).logits, plain(**batch).logits]
    losses = []
    for tp, pp, source in ((2, 2, path), (1, 4, path), (2, 1, single)):
        trainer, fresh = make_trainer(ctx, tp, pp, precision="32-true"), Plain(seed=4)
        with advice_ignored():
            found = trainer.validate(fresh, datamodule=Data(), ckpt_path=source, verbose=False)
        losses.append(found[0]["val_loss"])
    return {"logits": logits, "losses": losses, "rest": sorted(whole)}


def _tested_in_between(ctx: Context) -> dict[str, Any]:
    """Testing an older checkpoint takes its weights and no random state."""
    keep = ModelCheckpoint(ctx.tmp_path / "between", save_last=True)
    trainer = make_trainer(
        ctx, 2, 2, precision="32-true", callbacks=[keep], enable_checkpointing=True
    )
    module, data = Plain(), Data()
    trainer.fit(module, datamodule=data)
    calls: list[Any] = []
    with mock.patch.object(trainer_state, "scatter_rng_states", lambda *args: calls.append(args)):
        trainer.test(module, datamodule=data, ckpt_path="last", verbose=False)
    return {"restored": len(calls)}


def _weights_only(ctx: Context) -> dict[str, Any]:
    path = ctx.tmp_path / "weights.ckpt"
    module = Plain()
    trainer = fit(ctx, 2, 2, module, precision="32-true")
    trainer.save_checkpoint(path, weights_only=True)
    whole = _load_distributed_checkpoint(path)
    return {"entries": sorted(whole), "names": len(whole["model"])}


def _refused(ctx: Context) -> dict[str, Any]:
    module = Plain()
    trainer = fit(ctx, 2, 2, module, precision="32-true")
    path = ctx.tmp_path / "refused.ckpt"
    trainer.save_checkpoint(path)
    found: dict[str, Any] = {}
    for name, other, where in (
        ("size", Plain(layers=6), path),
        ("nowhere", Plain(), Path(ctx.tmp_path / "no.ckpt")),
    ):
        again = make_trainer(ctx, 2, 2, precision="32-true")
        found[name] = attempt(partial(again.fit, other, datamodule=Data(), ckpt_path=where))
    if ctx.rank == 0:
        shard = min(path.glob("*.distcp"))
        shard.write_bytes(shard.read_bytes()[:-1])
    trainer.strategy.barrier()
    again = make_trainer(ctx, 2, 2, precision="32-true")
    found["truncated"] = attempt(partial(again.fit, Plain(), datamodule=Data(), ckpt_path=path))
    found["storage"] = attempt(partial(trainer.save_checkpoint, path, storage_options=1))
    return found


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return world(8, _interrupted_in_fp32, _interrupted_in_bf16)


@pytest.fixture(scope="module")
def more() -> dict[str, list[Any]]:
    return world(4, _elsewhere, _tested_in_between, _weights_only, _refused)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_fit_has_the_bits_of_an_unbroken_one(
    runs: dict[str, list[Any]], precision: str
) -> None:
    for rank in good(runs[f"interrupted_in_{precision}"]):
        unbroken, resumed = rank["losses"]
        assert len(unbroken) == 4
        assert resumed == unbroken
        mine, theirs = rank["parameters"]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert rank["note"] == "mine"
        assert rank["steps"] == 12
        assert rank["rates"] == [1e-2 / 2**6]


def test_the_folder_is_a_plain_models_and_any_layouts(more: dict[str, list[Any]]) -> None:
    for rank in good(more["elsewhere"]):
        mesh, plain = rank["logits"]
        torch.testing.assert_close(mesh, plain, rtol=1e-5, atol=1e-5)
        first, *others = rank["losses"]
        assert others == pytest.approx([first] * 2, rel=1e-5)
        assert {"model", "optimizer_0", "epoch", "global_step", "loops", "note"} <= set(
            rank["rest"]
        )


def test_testing_a_checkpoint_leaves_random_states_alone(more: dict[str, list[Any]]) -> None:
    assert all(rank["restored"] == 0 for rank in good(more["tested_in_between"]))


def test_weights_alone_can_be_saved(more: dict[str, list[Any]]) -> None:
    for rank in good(more["weights_only"]):
        assert "optimizer_0" not in rank["entries"]
        assert rank["names"] == len(tiny_model("llama").state_dict())


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("size", "CheckpointError", r"another model.*layers\.4.*not in the checkpoint"),
        ("nowhere", "CheckpointError", r"no\.ckpt"),
        ("truncated", "CheckpointError", "distcp"),
        ("storage", "TypeError", "storage_options are not supported"),
    ],
)
def test_what_cannot_be_loaded_is_refused_on_every_rank(
    more: dict[str, list[Any]], case: str, kind: str, message: str
) -> None:
    results = [rank[case] for rank in good(more["refused"])]
    assert all(isinstance(result, Raised) for result in results)
    same_error(results, kind, message)
