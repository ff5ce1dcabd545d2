"""A real checkpoint: in, trained, saved, resumed in another layout, out again.

The model and the text are those of the fine-tuning recipe. They are fetched once, into the folder
that the recipe uses. ``GOOSE3D_REAL_STEPS`` (``make real``) makes it train longer.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer

import goose_strategy
from tests.harness.worker import ROOT, Context
from tests.harness.world import run_ranks
from tests.strategies.ranks import make_fabric

FOLDER = ROOT / "runs" / "smollm2"
MODEL = FOLDER / "model"
STEPS = int(os.environ.get("GOOSE3D_REAL_STEPS", "2"))
ROWS, LENGTH, RATE = 4, 32, 1e-4
PATIENCE_S = 600 + 60 * STEPS

pytestmark = [pytest.mark.real, pytest.mark.timeout(2 * PATIENCE_S)]


@pytest.fixture(scope="module")
def ids() -> Tensor:
    """Packed verses, ``[2 * STEPS, ROWS, LENGTH]``."""
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        from smollm2 import Verses
    finally:
        sys.path.remove(str(ROOT / "recipes"))
    data = Verses(path=str(MODEL), folder=str(FOLDER), sequence_length=LENGTH)
    data.prepare_data()
    data.setup("fit")
    rows = data.splits["train"][: 2 * STEPS * ROWS]["input_ids"]
    return torch.as_tensor(rows).view(2 * STEPS, ROWS, LENGTH)


def _alone(_ctx: Context, batches: Tensor) -> dict[str, Any]:
    """Plain transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train()
    optimizer = AdamW(model.parameters(), lr=RATE)
    losses = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        logits = model.eval()(input_ids=batches[0]).logits
    return {"losses": losses, "logits": logits}


def _set_up(ctx: Context, tp: int, pp: int) -> Any:
    fabric = make_fabric(ctx, tp, pp, precision="32-true")
    model = goose_strategy.from_pretrained(MODEL, dtype=torch.float32).train()
    optimizer = AdamW(model.parameters(), lr=RATE)
    return fabric, *fabric.setup(model, optimizer)


def _train(fabric: Any, model: Any, optimizer: Any, batches: Tensor) -> list[float]:
    losses = []
    replicas = fabric.strategy.distributed_sampler_kwargs
    for batch in batches:
        own = batch.chunk(replicas["num_replicas"])[replicas["rank"]]
        loss = model(input_ids=own, labels=own).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _first(ctx: Context, batches: Tensor, folder: Path) -> list[float]:
    fabric, model, optimizer = _set_up(ctx, 3, 2)
    losses = _train(fabric, model, optimizer, batches[:STEPS])
    fabric.save(folder / "checkpoint", {"model": model, "optimizer": optimizer})
    return losses


def _second(ctx: Context, batches: Tensor, folder: Path) -> tuple[list[float], Tensor]:
    fabric, model, optimizer = _set_up(ctx, 1, 3)
    fabric.load(folder / "checkpoint", {"model": model, "optimizer": optimizer})
    losses = _train(fabric, model, optimizer, batches[STEPS:])
    fabric.strategy.export(model, folder / "export")
    with torch.no_grad():
        # Whole logits, of this replica's rows.
        logits = model.eval()(input_ids=batches[0].chunk(2)[ctx.rank % 2]).logits
    return losses, logits


def test_a_real_model_goes_in_and_comes_out(ids: Tensor, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"isolated": True, "timeout_s": PATIENCE_S}
    [alone] = run_ranks(_alone, 1, ids, **settings)
    # tp3 x pp2, then pp3 x dp2: nine heads and three key heads allow no other tp.
    first = run_ranks(_first, 6, ids, tmp_path, **settings)
    second = run_ranks(_second, 6, ids, tmp_path, **settings)
    assert all(losses == first[0] for losses in first)
    later = [losses for losses, _ in second]
    assert all(losses == later[0] for losses in later)
    assert [*first[0], *later[0]] == pytest.approx(alone["losses"], rel=1e-4)
    if STEPS >= 20:
        assert sum(alone["losses"][-10:]) < sum(alone["losses"][:10])

    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids[0]).logits
    trained = torch.cat([second[0][1], second[1][1]])
    torch.testing.assert_close(logits, trained, rtol=1e-4, atol=1e-3)
    # AdamW turns rounding in small gradients into steps, in one process too.
    assert (logits - alone["logits"]).norm() < 5e-3 * alone["logits"].norm()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer("In the beginning")["input_ids"]
