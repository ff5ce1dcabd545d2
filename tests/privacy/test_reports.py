"""Reports from users of Opacus, re-enacted: none of them can happen here.

Each test names the public issue it follows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from goose_strategy.privacy.ledger import Ledger
from goose_strategy.privacy.sampler import Draw
from tests.harness.models import IGNORED, batches
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.parity.lora import LAYERS
from tests.parity.session import Pieces
from tests.privacy.oracle import (
    PrivateCase,
    assert_same,
    ledger_of,
    pieces,
    private_call,
    reference_call,
    run_call,
    start,
)
from tests.privacy.test_parity import clipped
from tests.privacy.test_release import DIVISOR, LIMIT, noisy, noisy_call


def test_ignored_tokens_do_not_dilute_a_sample() -> None:
    """meta-pytorch/opacus #792, #808: ghost clipping took the mean over ignored tokens, too."""
    short, long = batches(1, batch_size=4, padded=False)[0], batches(1, batch_size=4)[0]
    short["labels"][:, 4:] = IGNORED
    case = clipped(PrivateCase(pp=2, schedule="ZBH1"), "some")
    for batch in (short, long):
        assert_same(run_call(case, batch), reference_call(case, batch), 1e-9)
    # More ignored positions behind the same tokens change nothing.
    cut = {name: value[:, :6] for name, value in short.items()}
    whole, part = run_call(case, short), run_call(case, cut)
    assert torch.allclose(whole.norms, part.norms, rtol=1e-9)


def test_a_loss_has_a_mean_of_its_own_for_every_row() -> None:
    """meta-pytorch/opacus #792 again: rows of different numbers of valid tokens."""
    batch = batches(1, batch_size=4, padded=False)[0]
    for row in range(4):
        batch["labels"][row, 2 + 2 * row :] = IGNORED
    case = clipped(PrivateCase(tied=True, tp=2), "some")
    together = run_call(case, batch)
    for row in range(4):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        found = run_call(replace(case, microbatches=1), alone)
        assert torch.allclose(found.norms, together.norms[row], rtol=1e-9)


@pytest.mark.parametrize("adapters_first", [True, False])
def test_adapters_change_and_nothing_else_does(adapters_first: bool) -> None:
    """meta-pytorch/opacus #820: with peft, in one order of the set-up, weights were corrupted.

    What an optimizer steps is what the model computes with, and the base stays what it was.
    """
    case = PrivateCase(targets=LAYERS, tp=2 if adapters_first else 1, dp=2).clipped_at(1.0)
    before = {n: p.detach().clone() for n, p in case.model().named_parameters()}
    trainable = {n for n, p in case.model().named_parameters() if p.requires_grad}
    run = run_call(case, batches(1, batch_size=8)[0])
    assert trainable == set(run.sums)
    for name, value in run.parameters.items():
        assert torch.equal(value, before[name]) != (name in trainable), name


@pytest.mark.parametrize("mesh", [{}, {"pp": 2}, {"tp": 2}], ids=str)
def test_gpt2_with_its_tied_head(mesh: Any) -> None:
    """meta-pytorch/opacus #413, #417: per-sample gradients of a tied weight were refused."""
    case = clipped(PrivateCase(family="gpt2", tied=True, **mesh), "some")
    batch = batches(1, batch_size=4)[0]
    assert_same(run_call(case, batch), reference_call(case, batch), 1e-9)


def test_replicas_without_poisson_sampling_take_each_sample_once() -> None:
    """meta-pytorch/opacus #444: two replicas processed every sample twice."""
    batch = batches(1, batch_size=8)[0]
    one = run_call(PrivateCase(tied=True), batch)
    two = run_call(PrivateCase(tied=True, dp=2), batch)
    assert torch.allclose(one.norms, two.norms, rtol=1e-9)
    for name, value in one.sums.items():
        assert torch.allclose(two.sums[name], value, rtol=1e-8, atol=1e-12), name


def test_an_empty_draw_is_a_noisy_step() -> None:
    """meta-pytorch/opacus #161, #522: an empty Poisson batch crashed, or was left out."""
    draw = Draw(size=9, rate=1e-9, most=None, root=b"r", replicas=2, replica=1, multiple=3)
    assert draw.rows(5) == [(0, 0)] * 3
    batch = {**batches(1, batch_size=8)[0], "sample_mask": torch.zeros(8, dtype=torch.long)}
    case = noisy(dp=2, pp=2, schedule="ZBH1")
    for seen, full in zip(
        run_ranks(private_call, 4, case, batch, None), noisy_call(case), strict=True
    ):
        assert seen.loss == 0
        for name, (_, value) in seen.sums.items():
            assert not value.any(), name
            noise = full.noised[name][1] * 5 - full.sums[name][1]
            assert torch.allclose(seen.noised[name][1] * 5, noise, atol=1e-9), name


@pytest.mark.parametrize("norm", ["ghost", "mixed"])
def test_every_way_to_a_norm_trains_alike(norm: str) -> None:
    """meta-pytorch/opacus #692: models trained worse with ghost clipping than with hooks."""
    batch = batches(1, batch_size=8)[0]
    case = clipped(PrivateCase(family="qwen3", tied=True, pp=2), "some")
    limit = case.privacy.max_grad_norm
    plain = run_call(case.clipped_at(limit, norm="instantiate"), batch)
    found = run_call(case.clipped_at(limit, norm=norm), batch)
    for name, value in plain.parameters.items():
        assert torch.allclose(found.parameters[name], value, rtol=1e-9, atol=1e-12), name


CLIPPINGS = ("flat", "automatic", "per_stage")


def noise_and_account(ctx: Context, clipping: str) -> tuple[Pieces, Pieces, list[Any]]:
    """Return clipped sums, the same with noise, and what was counted of one step."""
    case = noisy(pp=2)
    privacy = replace(case.privacy, clipping=clipping, sampling="poisson", tied="exact")
    runtime, handle, optimizer = start(replace(case, privacy=privacy, tied=False))
    try:
        ledger = ledger_of(runtime)
        ledger.know_data(50)
        batch = {**batches(1, batch_size=4)[0], "sample_mask": torch.ones(4, dtype=torch.long)}
        loss = handle.module(**batch).loss
        with runtime.backward(loss):
            loss.backward()
        sums = pieces(handle, handle.reducer.full_gradients())
        optimizer.step()
        noised = pieces(handle, handle.reducer.full_gradients())
        return sums, noised, ledger.state_dict()["history"]
    finally:
        runtime.stop()


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_what_is_counted_is_the_noise_that_was_added(clipping: str) -> None:
    """meta-pytorch/opacus #807: adaptive clipping counted another noise than it was asked for.

    Whatever the clipping, the joint norm of a sample is at most ``max_grad_norm``, the noise is
    ``noise_multiplier`` times that, and this multiplier is counted.
    """
    for sums, noised, history in run_ranks(noise_and_account, 2, clipping):
        ((sigma, rate, _, _, steps),) = history
        assert (rate, steps) == (DIVISOR / 50, 1)
        drawn = [noised[n][1] * DIVISOR - part for n, (_, part) in sums.items()]
        noise = torch.cat([part.reshape(-1) for part in drawn])
        # What is counted of what was added: three standard errors of a standard deviation.
        error = 3 / (2 * noise.numel()) ** 0.5
        assert float(noise.std()) / LIMIT == pytest.approx(sigma, rel=error)


@pytest.mark.parametrize("size", [50, 51, 99])
def test_no_divisor_hangs_on_the_size_of_the_data(size: int) -> None:
    """meta-pytorch/opacus #571, #819: a batch size rounded from the data's told of a single row."""
    found = []
    for samples in (size, size + 1):
        ledger = Ledger(noisy().privacy, None)
        ledger.know_data(samples)
        assert ledger.rate == DIVISOR / samples
        ledger.note_released()
        found.append((ledger.config.logical_batch_size, ledger.begin_step()))
    assert found[0] == found[1]
