"""One pipelined call: whose loss, whose logits, and when its gradients may be released."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from goose_strategy.runtime.pipeline import Release, releases_of
from tests.harness.compare import named_gradients, token_loss
from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import message, started

EXACT = 1e-10


def squared(outputs: Any, microbatch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A loss of the user's own: squared logits, over the rows."""
    return outputs.logits.square().sum(), torch.tensor(len(microbatch["input_ids"]))


def plain(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def _own_loss(ctx: Context) -> dict[str, Any]:
    """dp2 x pp2, and a last microbatch of one row."""
    whole = batches(1, batch_size=6)[0]
    with started(1, 2, loss_fn=squared, return_logits=True) as runtime:
        model = tiny_model("llama")
        handle = runtime.shard_module(model)
        mine = rows_of(whole, runtime.mesh.dp_rank, 2)
        output = model(**plain(mine))
        with runtime.backward(output.loss):
            output.loss.backward()
        assert handle.reducer is not None
        return {
            "loss": output.loss.item(),
            "gradients": handle.reducer.full_gradients(),
            "logits": output.logits,
            "mine": mine,
        }


def test_a_loss_of_the_users_own_is_the_mean_over_everything() -> None:
    model = tiny_model("llama")
    whole = batches(1, batch_size=6)[0]
    logits = model(**plain(whole)).logits
    loss = logits.square().sum() / 6
    loss.backward()
    expected = named_gradients(model)
    for rank in run_ranks(_own_loss, 4):
        assert rank["loss"] == pytest.approx(loss.item(), rel=EXACT)
        for name, gradient in rank["gradients"].items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-9)
        alone = model(**plain(rank["mine"])).logits
        torch.testing.assert_close(rank["logits"], alone, rtol=EXACT, atol=EXACT)
        assert not rank["logits"].requires_grad


def _no_loss(ctx: Context) -> list[Any]:
    with started(1, 2) as runtime:
        model = tiny_model("llama")
        runtime.shard_module(model)
        batch = batches(1)[0]
        training = model(**batch)
        with torch.no_grad():
            evaluation = model(**batch)
        ragged = model([plain({k: v[:, :n] for k, v in batch.items()}) for n in (5, 8)])
        return [
            training.logits,
            evaluation.logits,
            tuple(logits.shape for logits in ragged.logits),
            releases_of(evaluation.loss),
        ]


def test_logits_travel_where_they_are_asked_for() -> None:
    for training, evaluation, ragged, releases in run_ranks(_no_loss, 2):
        assert training is None
        assert evaluation is None
        assert ragged == ((4, 5, 97), (4, 8, 97))
        assert releases == []


def _releases(ctx: Context) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with started(1, 2) as runtime:
        model = tiny_model("llama")
        handle = runtime.shard_module(model)
        batch = batches(1)[0]
        first, second = model(**batch).loss, model(**batch).loss
        both = (first / 2 + second * 0.25).log()
        found["two"] = [type(release) for release in releases_of(both)]
        found["none"] = releases_of(torch.ones((), requires_grad=True) * 2)
        with runtime.backward(both):
            both.backward()
        found["second"] = message(lambda: handle.check_loss(first), RuntimeError)
        found["past the check"] = message(lambda: releases_of(second)[0].check(), RuntimeError)
        with runtime.no_sync(model):
            local = model(**batch).loss
        found["sync"] = message(partial(handle.check_loss, local), RuntimeError)
        dropped = weakref.ref(releases_of(local)[0])
        del local
        gc.collect()
        found["dropped"] = dropped() is None
        late = model(**batch).loss
    found["closed"] = message(lambda: releases_of(late)[0].check(), RuntimeError)
    return found


def test_a_loss_knows_whether_its_backward_may_come() -> None:
    for found in run_ranks(_releases, 2):
        assert found["two"] == [Release, Release]
        assert found["none"] == []
        assert "second time" in found["second"]
        assert "second time" in found["past the check"]
        assert "without gradient sync and its backward with" in found["sync"]
        assert found["dropped"], "a call whose loss is dropped keeps its gradients"
        assert "module was closed" in found["closed"]


def _factors(ctx: Context) -> list[dict[str, Tensor]]:
    """What reaches the loss multiplies the gradients, whatever the user's arithmetic."""
    found = []
    with started(1, 2) as runtime:
        model = tiny_model("llama")
        handle = runtime.shard_module(model)
        batch = batches(1)[0]
        for change in (lambda x: x, lambda x: x / 4, torch.exp, lambda x: -x):
            loss = change(model(**batch).loss)
            with runtime.backward(loss):
                loss.backward()
            assert handle.reducer is not None
            found.append(handle.reducer.full_gradients())
            model.zero_grad()
    return found


def test_any_function_of_the_loss_has_its_gradient() -> None:
    batch = batches(1)[0]
    expected = []
    for change in (lambda x: x, lambda x: x / 4, torch.exp, lambda x: -x):
        model = tiny_model("llama")
        change(token_loss(model(**plain(batch)).logits, batch["labels"])).backward()
        expected.append(named_gradients(model))
    for rank in run_ranks(_factors, 2):
        for mine, theirs in zip(rank, expected, strict=True):
            assert mine
            for name, gradient in mine.items():
                torch.testing.assert_close(gradient, theirs[name], rtol=1e-9, atol=1e-11)


def test_the_oracle_is_a_mean_over_tokens() -> None:
    batch = batches(1)[0]
    logits = tiny_model("llama")(**plain(batch)).logits
    theirs = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert token_loss(logits, batch["labels"]).item() == pytest.approx(theirs.item(), rel=EXACT)


def _arguments(_ctx: Context) -> list[bool]:
    """What the layers of a stage are given of an argument that only private training reads."""
    seen: list[bool] = []
    with started(1, 2) as runtime:
        model = tiny_model("llama")
        runtime.shard_module(model)
        for layer in model.model.layers:
            layer.register_forward_pre_hook(
                lambda _module, _args, kwargs: seen.append("sample_mask" in kwargs),
                with_kwargs=True,
            )
        model(**batches(1)[0], sample_mask=torch.ones(8))
    return seen


def test_arguments_are_left_alone_without_privacy() -> None:
    for seen in run_ranks(_arguments, 2):
        assert seen
        assert all(seen)
