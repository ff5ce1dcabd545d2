"""Private training bounds every sample, and without noise and clipping it is ordinary training."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.harness.compare import assert_close_named, token_loss
from tests.harness.models import IGNORED, Batch, batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks
from tests.parity.grid import assemble
from tests.parity.session import OPTIMIZERS, Pieces
from tests.privacy.oracle import (
    INF,
    PrivateCase,
    assert_same,
    ledger_of,
    per_sample_losses,
    pieces,
    reference_call,
    run_call,
    start,
)

LLAMA = PrivateCase(tied=True, schedule="ZBH1")
BATCH = batches(1, batch_size=6)[0]


# -- without noise and clipping it is ordinary training -------------------------------------------


def train(ctx: Context, case: PrivateCase, every: list[Batch]) -> tuple[list[float], Pieces]:
    """Train on global batches."""
    runtime = None
    try:
        runtime, handle, optimizer = start(case)
        losses = []
        for batch in every:
            loss = handle.module(**rows_of(batch, runtime.mesh.dp_rank, case.dp)).loss
            with runtime.backward(loss):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, pieces(handle, dict(handle.module.named_parameters()))
    finally:
        if runtime is not None:
            runtime.stop()


@pytest.mark.parametrize("mesh", [{}, {"pp": 2, "tp": 2, "dp": 2}], ids=["alone", "all"])
def test_without_noise_and_clipping_it_is_ordinary_training(mesh: dict[str, int]) -> None:
    case = replace(LLAMA, **mesh).clipped_at(INF, logical_batch_size=8)  # type: ignore[arg-type]
    every = batches(4, batch_size=8)
    ranks = run_ranks(train, case.world_size, case, every)
    model = case.model()
    optimizer = OPTIMIZERS[case.optimizer](list(model.parameters()))
    losses = []
    for batch in every:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        loss = per_sample_losses(model(**inputs).logits, batch["labels"]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for mine, _ in ranks:
        assert mine == pytest.approx(losses, rel=1e-10)
    whole = assemble([part for _, part in ranks], "parameters")
    assert_close_named(whole, {n: p.detach() for n, p in model.named_parameters()}, 1e-9)


def evaluate(ctx: Context, case: PrivateCase, batch: Batch) -> tuple[float, Tensor]:
    """Return the loss of an evaluation, and logits of a call without labels."""
    runtime = None
    try:
        runtime, handle, _ = start(case)
        mine = rows_of(batch, runtime.mesh.dp_rank, case.dp)
        marked = {**mine, "sample_mask": torch.ones(mine["labels"].shape[0])}
        with torch.no_grad():
            loss = handle.module(**marked).loss.item()
            logits = handle.module(
                input_ids=mine["input_ids"], attention_mask=mine["attention_mask"]
            ).logits
        return loss, logits
    finally:
        if runtime is not None:
            runtime.stop()


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_an_evaluation_has_the_mean_over_all_tokens(mesh: dict[str, int]) -> None:
    case = replace(LLAMA, **mesh)  # type: ignore[arg-type]
    model = case.model()
    with torch.no_grad():
        output = model(**{k: v for k, v in BATCH.items() if k != "labels"})
    expected = token_loss(output.logits, BATCH["labels"]).item()
    found = run_ranks(evaluate, case.world_size, case, BATCH)
    for loss, _ in found:
        assert loss == pytest.approx(expected, rel=1e-10)
    if not mesh:
        assert torch.allclose(found[0][1], output.logits, rtol=1e-9)


# -- removing any row moves the sum by at most the norm -------------------------------------------


def adversarial() -> Batch:
    """Return rows that are ordinary, constant, alternating, and with one or no label."""
    batch = batches(1, batch_size=8, padded=False)[0]
    ids = batch["input_ids"]
    ids[1] = 7
    ids[2] = torch.tensor([7, 9]).repeat(ids.shape[1] // 2)
    ids[3] = ids[4]
    labels = ids.clone()
    labels[5] = IGNORED
    labels[5, 3] = ids[5, 3]
    labels[6] = IGNORED
    return {"input_ids": ids, "labels": labels}


def sums_without_each(
    ctx: Context, case: PrivateCase, batch: Batch, number: int | None = None
) -> list[Pieces]:
    """Return the clipped sums of all rows, and without each one (of the first) of them."""
    runtime = None
    try:
        runtime, handle, optimizer = start(case)
        with torch.no_grad():
            for name, param in handle.module.named_parameters():
                # Large logits: gradients of the head and the embedding outweigh all others.
                if param.dim() == 2 and "embed" in name:
                    param.mul_(3)
        found = []
        for left_out in (None, *range(number or batch["input_ids"].shape[0])):
            mask = torch.ones(batch["input_ids"].shape[0], dtype=torch.long)
            if left_out is not None:
                mask[left_out] = 0
            with torch.autocast("cpu", case.autocast) if case.autocast else nullcontext():
                loss = handle.module(**batch, sample_mask=mask).loss
            with runtime.backward(loss):
                loss.backward()
            found.append(pieces(handle, handle.reducer.full_gradients()))
            optimizer.zero_grad()
            # No step: the sums are looked at, which a run may not do.
            ledger_of(runtime)._released = 0
        return found
    finally:
        if runtime is not None:
            runtime.stop()


@pytest.mark.parametrize("limit", [0.05, 5.0])
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"tp": 2}], ids=["pp2", "tp2"])
def test_removing_a_row_moves_the_sum_by_at_most_the_norm(
    mesh: dict[str, int], limit: float
) -> None:
    case = replace(LLAMA, dtype=torch.float32, **mesh).clipped_at(limit)  # type: ignore[arg-type]
    ranks = run_ranks(sums_without_each, 2, case, adversarial())
    every = [assemble([rank[number] for rank in ranks], "sums") for number in range(9)]
    whole, moved = every[0], []
    for without in every[1:]:
        squares = [(whole[name] - without[name]).double().square().sum() for name in whole]
        moved.append(float(torch.stack(squares).sum().sqrt()))
    assert max(moved) <= limit * (1 + 1e-5)
    assert max(moved) > 0.9 * limit, "nothing was clipped, so nothing was shown"
    assert moved[6] == 0, "a row without labels has a gradient"


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["true", "mixed"])
def test_sums_of_many_rows_are_not_rounded_to_sixteen_bits(autocast: torch.dtype | None) -> None:
    """A sum as long as a hundred norms, rounded to bf16, would move by more than one row is."""
    dtype = torch.float32 if autocast else torch.bfloat16
    case = PrivateCase(dtype=dtype, autocast=autocast, microbatches=1).clipped_at(0.5)
    ids = batches(1, batch_size=1, padded=False)[0]["input_ids"].repeat(160, 1)
    (ranks,) = run_ranks(sums_without_each, 1, case, {"input_ids": ids, "labels": ids}, 1)
    whole, without = (assemble([one], "sums") for one in ranks)
    squares = [(whole[name] - without[name]).double().square().sum() for name in whole]
    moved = float(torch.stack(squares).sum().sqrt())
    assert moved <= 0.5 * (1 - 2**-8), "the room for devices is used up"
    assert moved > 0.98 * 0.5
    total = float(torch.stack([value.double().square().sum() for value in whole.values()]).sum())
    assert total**0.5 > 150 * 0.5


def test_a_mean_over_the_tokens_of_a_batch_moves_it_by_more() -> None:
    """What the per-sample loss is for: transformers' own divides every row by all tokens."""
    model = tiny_model("llama", tied=True)
    batch = batches(1, batch_size=8, padded=False)[0]
    for row in range(7):
        batch["input_ids"][row] = batch["input_ids"][0]
        batch["labels"][row] = batch["input_ids"][0]
        batch["labels"][row, 2:] = IGNORED
    limit = 0.0

    def clipped_sum(rows: int) -> Tensor:
        labels = batch["labels"][:rows]
        count = (labels[:, 1:] != IGNORED).sum()
        total: list[Tensor] = []
        for row in range(rows):
            logits = model(batch["input_ids"][row : row + 1]).logits
            valid = (labels[row, 1:] != IGNORED).sum()
            loss = per_sample_losses(logits, labels[row : row + 1]).sum() * valid / count
            parts = torch.autograd.grad(loss, list(model.parameters()))
            flat = torch.cat([part.reshape(-1) for part in parts])
            norms.append(float(flat.norm()))
            total.append(flat * min(1.0, limit / float(flat.norm())))
        return torch.stack(total).sum(0)

    norms: list[float] = []
    clipped_sum(7)
    # Above it among seven rows, below among eight, whose last one has many tokens.
    limit = 0.9 * norms[0]
    assert float((clipped_sum(8) - clipped_sum(7)).norm()) > 1.1 * limit


# -- rows that are not finite ---------------------------------------------------------------------

BAD_TOKEN = 5


def spoil(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Make the hidden states of rows that begin with `BAD_TOKEN` not finite."""
    bad = (args[0][:, :1] == BAD_TOKEN).unsqueeze(-1)
    return output.masked_fill(bad, float("nan"))


class SpoiledCase(PrivateCase):
    """A case whose model computes NaN for some rows."""

    def model(self) -> nn.Module:
        """Build it."""
        model = super().model()
        assert isinstance(model, PreTrainedModel)
        model.get_input_embeddings().register_forward_hook(spoil)
        return model


@pytest.mark.parametrize("mesh", [{}, {"pp": 2, "tp": 2}], ids=["alone", "pp2-tp2"])
def test_a_row_that_is_not_finite_counts_as_nothing(mesh: dict[str, int]) -> None:
    batch = batches(1, batch_size=6)[0]
    batch["input_ids"][:, 0] = 9
    batch["input_ids"][2, 0] = BAD_TOKEN
    kept = torch.arange(6) != 2
    theirs = reference_call(LLAMA, {name: value[kept] for name, value in batch.items()})
    limit = float(theirs.norms.quantile(0.6))
    theirs = reference_call(
        LLAMA.clipped_at(limit), {name: value[kept] for name, value in batch.items()}
    )
    case = SpoiledCase(tied=True, **mesh).clipped_at(limit)  # type: ignore[arg-type]
    mine = run_call(case, batch)
    assert torch.isnan(mine.norms[2])
    assert torch.allclose(mine.norms[kept], theirs.norms, rtol=1e-9)
    assert_close_named(mine.sums, theirs.sums, 1e-9)
    assert all(bool(torch.isfinite(p).all()) for p in mine.parameters.values())


# -- layers between a column and a row layer ------------------------------------------------------


class MixingCase(PrivateCase):
    """A case whose heads go through one linear layer, which every tp rank holds whole."""

    def model(self) -> nn.Module:
        """Build it."""
        model: Any = super().model()
        for layer in model.model.layers:
            mix = nn.Linear(8, 8, bias=False, dtype=self.dtype)
            with torch.no_grad():
                mix.weight.copy_(torch.eye(8))
            layer.self_attn.q_norm = mix
        return model  # type: ignore[no-any-return]


def test_a_whole_layer_that_sees_heads_of_one_rank_is_refused() -> None:
    """The sum of products is not the product of sums where each rank has another input."""
    case = MixingCase(family="qwen3")
    assert_same(run_call(case, BATCH), reference_call(case, BATCH), 1e-9)
    with pytest.raises(RankFailure, match=r"q_norm\.weight has another input on every tp rank"):
        run_call(replace(case, tp=2), BATCH)
