"""Both doors save to a URL and load from it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.strategies.lightning_module import Data, LanguageModel, make_trainer
from tests.strategies.ranks import good, make_fabric, world


def weights(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def _fabric(ctx: Context) -> tuple[bool, bool]:
    # Seen by all ranks; an object store would be named like this: s3://bucket/run/last.ckpt.
    url = f"dir://last.ckpt::file://{ctx.tmp_path}/bucket"
    found = []
    for seed in (0, 1):
        fabric = make_fabric(ctx, 1, 2)
        model = tiny_model("llama", seed=seed)
        model, optimizer = fabric.setup(model, AdamW(model.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "step": seed}
        if seed == 0:
            fabric.backward(model(**rows_of(batches(1)[0], 0, 1)).loss)
            optimizer.step()
            fabric.save(url, state)
        else:
            fabric.load(url, state)
        found.append((weights(model), state["step"]))
    (saved, _), (loaded, step) = found
    return all(map(torch.equal, saved, loaded)), step == 0


def _trainer(ctx: Context) -> tuple[bool, int]:
    url = "memory://test_remote/last.ckpt"
    first, second = LanguageModel(), LanguageModel(seed=1)
    trainer = make_trainer(ctx)
    trainer.fit(first, datamodule=Data())
    trainer.save_checkpoint(url)
    saved = weights(first)
    trainer = make_trainer(ctx, max_epochs=1)
    trainer.fit(second, datamodule=Data(), ckpt_path=url)
    return all(map(torch.equal, saved, weights(second))), trainer.global_step


def test_fabric_saves_to_a_url_and_loads_from_it() -> None:
    assert good(world(2, _fabric)["fabric"]) == [(True, True)] * 2


def test_the_trainer_saves_to_a_url_and_resumes_from_it() -> None:
    assert good(world(1, _trainer)["trainer"]) == [(True, 4)]
