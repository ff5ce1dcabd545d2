"""Checkpoints of the hub through both doors: in by ``from_pretrained``, out by ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file
from torch.optim import AdamW
from transformers.models.auto import AutoModelForCausalLM

import goose_strategy
from goose_strategy import cli
from goose_strategy.errors import CheckpointError, ConfigError
from tests.harness.models import batches, rows_of
from tests.harness.worker import Context
from tests.hub.checkpoints import CONFIGS, hub_model, keys_of, parameters_of
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.ranks import advice_ignored, attempt, good, make_fabric, same_error, world

IDS = torch.arange(3, 40).reshape(1, -1)


def source(ctx: Context) -> str:
    """Write a tied checkpoint that all ranks see."""
    path = ctx.tmp_path / "hub"
    if ctx.rank == 0 and not path.exists():
        hub_model("llama", tie_word_embeddings=True).save_pretrained(path)
    while not (path / "model.safetensors").exists():
        pass
    return str(path)


def train(fabric: Fabric, model: Any, optimizer: Any) -> list[float]:
    place = fabric.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
    losses = []
    for batch in batches(3, batch_size=8):
        loss = model(**rows_of(batch, place["rank"], place["num_replicas"])).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _fabric_ways(ctx: Context) -> dict[str, Any]:
    """Every place where a script may build its model gives the same losses."""
    path = source(ctx)
    early = goose_strategy.from_pretrained(path)
    losses: dict[str, Any] = {}
    for precision in ("32-true", "bf16-true", "64-true"):
        fabric = make_fabric(ctx, 2, 2, precision=precision)
        with fabric.init_module():
            inside = goose_strategy.from_pretrained(path)
        with fabric.init_module(empty_init=True):
            empty = goose_strategy.from_pretrained(path)
        models = {
            "after the launch": goose_strategy.from_pretrained(path),
            "init_module": inside,
            "empty_init": empty,
            "transformers": AutoModelForCausalLM.from_pretrained(path),
        }
        if precision == "32-true":
            models["before the launch"] = early
        for name, model in models.items():
            wrapped, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=1e-2))
            losses[f"{precision} {name}"] = train(fabric, wrapped, optimizer)
    return losses


def _fabric_separately(ctx: Context) -> bool:
    path = source(ctx)
    fabric = make_fabric(ctx, 2, 1, precision="32-true")
    found = []
    for load in (goose_strategy.from_pretrained, AutoModelForCausalLM.from_pretrained):
        model = fabric.setup_module(load(path))
        optimizer = fabric.setup_optimizers(AdamW(model.parameters(), lr=1e-2))
        found.append(train(fabric, model, optimizer))
    return found[0] == found[1]


def _fabric_out_and_in(ctx: Context) -> dict[str, Any]:
    """Train, save, export; load the checkpoint into models without weights, in other layouts."""
    path, found = source(ctx), dict[str, Any]()
    ckpt = ctx.tmp_path / "run.ckpt"
    fabric = make_fabric(ctx, 2, 2, precision="32-true")
    model = goose_strategy.from_pretrained(path)
    model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=1e-2))
    train(fabric, model, optimizer)
    fabric.save(ckpt, {"model": model, "optimizer": optimizer})
    fabric.strategy.export(model, ctx.tmp_path / "out", dtype="fp32")  # type: ignore[attr-defined]
    with torch.no_grad():
        found["trained"] = model(input_ids=IDS.expand(2, -1)).logits
    config = CONFIGS["llama"](tie_word_embeddings=True)
    for tp, pp in ((1, 4), (2, 1), (1, 1)):
        other = make_fabric(ctx, tp, pp, precision="32-true", partition="uniform")
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        for name, blank in (("meta", empty), ("hub", goose_strategy.from_pretrained(path))):
            loaded = other.setup_module(blank)
            if name == "meta":
                found["refused"] = attempt(lambda loaded=loaded: loaded(IDS))
                found["unsaved"] = attempt(
                    lambda loaded=loaded, other=other: other.save(
                        ctx.tmp_path / "empty.ckpt", {"model": loaded}
                    )
                )
            other.load(ckpt, {"model": loaded})
            with torch.no_grad():
                found[f"{name} {tp} {pp}"] = loaded(input_ids=IDS.expand(2, -1)).logits
    return found


def _fabric_part_of_a_checkpoint(ctx: Context) -> Any:
    """Without strictness, a checkpoint of a part leaves nothing without values."""
    fabric = make_fabric(ctx, 2, 1, precision="32-true")
    model = fabric.setup_module(hub_model("llama"))
    ckpt = ctx.tmp_path / "part.ckpt"
    fabric.save(ckpt, {"model": model}, filter={"model": lambda name, _: "norm" not in name})
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    empty = fabric.setup_module(empty)
    fabric.load(ckpt, {"model": empty}, strict=False)


@pytest.fixture(scope="module")
def of_fabric() -> dict[str, list[Any]]:
    return world(
        4, _fabric_ways, _fabric_separately, _fabric_out_and_in, _fabric_part_of_a_checkpoint
    )


def test_a_model_may_be_built_anywhere(of_fabric: dict[str, list[Any]]) -> None:
    for losses in good(of_fabric["fabric_ways"]):
        for precision in ("32-true", "bf16-true", "64-true"):
            expected = losses[f"{precision} transformers"]
            assert expected[-1] < expected[0]
            ways = {name: found for name, found in losses.items() if name.startswith(precision)}
            assert len(ways) >= 4
            assert all(found == expected for found in ways.values()), ways


def test_module_and_optimizer_may_be_set_up_apart(of_fabric: dict[str, list[Any]]) -> None:
    assert good(of_fabric["fabric_separately"]) == [True] * 4


def test_a_checkpoint_fills_a_model_without_weights_in_any_layout(
    of_fabric: dict[str, list[Any]],
) -> None:
    for found in good(of_fabric["fabric_out_and_in"]):
        for name in ("meta", "hub"):
            for layout in ("1 4", "2 1", "1 1"):
                torch.testing.assert_close(
                    found[f"{name} {layout}"], found["trained"], rtol=1e-5, atol=1e-5
                )
    for refusal in ("refused", "unsaved"):
        results = [found[refusal] for found in of_fabric["fabric_out_and_in"]]
        same_error(results, ConfigError.__name__, "have no values.*fabric.load")


def test_a_part_of_a_checkpoint_does_not_fill_a_model(of_fabric: dict[str, list[Any]]) -> None:
    results = of_fabric["fabric_part_of_a_checkpoint"]
    same_error(results, CheckpointError.__name__, "no values for.*norm.weight")


# -- the Trainer --------------------------------------------------------------------------------


class InConfigureModel(LanguageModel):
    """Builds its model in the hook for it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        del self.model
        self.path = path

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.build()

    def build(self) -> Any:
        return goose_strategy.from_pretrained(self.path).train()


class InInit(InConfigureModel):
    """Builds its model at once."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.model = self.build()


class ByTransformers(InInit):
    """As before this package could read checkpoints."""

    def build(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.path).train()


class Empty(InConfigureModel):
    """Has no weights but those of ``ckpt_path``."""

    def build(self) -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(CONFIGS["llama"](tie_word_embeddings=True))


def _trainer(ctx: Context) -> dict[str, Any]:
    path, found = source(ctx), dict[str, Any]()
    for kind in (InConfigureModel, InInit, ByTransformers):
        module = kind(path)
        trainer = make_trainer(ctx, 2, 2, precision="32-true")
        trainer.fit(module, datamodule=Data())
        found[kind.__name__] = module.losses
    ckpt = ctx.tmp_path / "fit.ckpt"
    trainer.save_checkpoint(ckpt)
    trainer.strategy.export(module, ctx.tmp_path / "out")  # type: ignore[attr-defined]
    with advice_ignored():
        (expected,) = trainer.validate(module, datamodule=Data(), verbose=False)
        empty = Empty(path)
        other = make_trainer(ctx, 1, 4, precision="32-true")
        (found["validated"],) = other.validate(
            empty, datamodule=Data(), ckpt_path=ckpt, verbose=False
        )
    found["expected"] = expected
    refusing = make_trainer(ctx, 2, 2, precision="32-true")
    found["refused"] = attempt(lambda: refusing.fit(Empty(path), datamodule=Data()))
    if ctx.rank == 0:
        found["exports"] = exports(ctx.tmp_path, ckpt)
    return found


def exports(folder: Path, ckpt: Path) -> Any:
    """Compare the export of the ranks with that of the command, in both types."""
    code = cli.main(["export", str(ckpt), str(folder / "offline")])
    half = cli.main(["export", str(ckpt), str(folder / "half"), "--dtype", "bf16"])
    again = cli.main(["export", str(ckpt), str(folder / "half")])
    online = load_file(folder / "out" / "model.safetensors")
    offline = load_file(folder / "offline" / "model.safetensors")
    same = online.keys() == offline.keys() == keys_of(folder / "hub")
    same = same and all(torch.equal(online[key], offline[key]) for key in online)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "half")
    cast = all(
        torch.equal(param, online[name].bfloat16())
        for name, param in parameters_of(loaded).items()
        if name in online
    )
    return code, half, again, same, cast


@pytest.fixture(scope="module")
def of_trainer() -> list[Any]:
    return good(world(4, _trainer)["trainer"])


def test_the_trainer_takes_a_model_from_either_place(of_trainer: list[Any]) -> None:
    for found in of_trainer:
        assert found["InConfigureModel"] == found["InInit"] == found["ByTransformers"]


def test_ckpt_path_fills_a_model_without_weights(of_trainer: list[Any]) -> None:
    for found in of_trainer:
        assert found["validated"] == pytest.approx(found["expected"], rel=1e-5)
    results = [found["refused"] for found in of_trainer]
    same_error(results, ConfigError.__name__, "have no values.*ckpt_path")


def test_the_command_exports_what_the_ranks_export(of_trainer: list[Any]) -> None:
    code, half, again, same, cast = of_trainer[0]["exports"]
    assert (code, half) == (0, 0)
    assert again == 2
    assert same, "the names or values of a LightningModule's model differ"
    assert cast
