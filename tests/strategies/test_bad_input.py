"""Bad batches: one clear error on every rank, and nobody is ended for it."""

from __future__ import annotations

import time
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.optim import SGD

from tests.harness.models import batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.strategies.ranks import Raised, attempt, good, make_fabric, same_error, world


def ready(ctx: Context, **sizes: Any) -> tuple[Fabric, Any, Any]:
    fabric = make_fabric(ctx, **{"tp": 2, "pp": 2, **sizes})
    model = tiny_model("llama")
    model, optimizer = fabric.setup(model, SGD(model.parameters(), lr=0.1))
    return fabric, model, optimizer


def _an_empty_batch(ctx: Context) -> list[Raised]:
    """On the way through the schedule and without one."""
    found = []
    for sizes in ({}, {"tp": 1, "pp": 1}):
        _, model, _ = ready(ctx, **sizes)
        empty = {name: value[:0] for name, value in batches(1)[0].items()}
        found.append(attempt(lambda model=model, empty=empty: model(**empty)))
    _, model, _ = ready(ctx)
    found.append(attempt(lambda: model([])))
    return found


def _other_ids_on_one_rank(ctx: Context) -> list[Raised]:
    found = []
    for sizes in ({}, {"tp": 2, "pp": 1}):
        _, model, _ = ready(ctx, **sizes)
        batch = batches(1, seed=int(ctx.rank == 3))[0]
        if sizes:  # without labels, so that no replica waits for the other
            batch.pop("labels")
        answer = attempt(lambda model=model, batch=batch: model(**batch))
        found.append(answer if isinstance(answer, Raised) else None)
    return found


def _rows_that_do_not_match(ctx: Context) -> Raised:
    _, model, _ = ready(ctx)
    batch = batches(1)[0]
    raised: Raised = attempt(lambda: model(**{**batch, "labels": batch["labels"][:2]}))
    return raised


def _a_backward_of_another_tensor(ctx: Context) -> Raised:
    fabric, model, _ = ready(ctx, return_logits=True)
    model(**batches(1)[0])
    loss = (torch.ones((), requires_grad=True) * 2).sum()
    raised: Raised = attempt(partial(fabric.backward, loss))
    return raised


def _a_second_backward(ctx: Context) -> Raised:
    fabric, model, _ = ready(ctx)
    loss = model(**batches(1)[0]).loss
    fabric.backward(loss)
    raised: Raised = attempt(partial(fabric.backward, loss))
    return raised


def _a_cache(ctx: Context) -> Raised:
    _, model, _ = ready(ctx)
    ids = batches(1)[0]["input_ids"]
    raised: Raised = attempt(lambda: model.generate(ids, max_new_tokens=2, use_cache=True))
    return raised


def _no_cache(ctx: Context) -> Any:
    _, model, _ = ready(ctx)
    mask, ids = batches(1)[0]["attention_mask"], batches(1)[0]["input_ids"]
    return model.generate(ids, attention_mask=mask, max_new_tokens=4, use_cache=False)


def _a_norm_that_is_not_finite(ctx: Context) -> tuple[Raised, bool]:
    fabric, model, optimizer = ready(ctx)
    loss = model(**batches(1)[0]).loss
    fabric.backward(loss * float("inf"))
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    raised: Raised = attempt(lambda: fabric.clip_gradients(model, optimizer, max_norm=1.0))
    after = [p.grad for p in model.parameters() if p.grad is not None]
    bits = [(a.view(torch.int64), b.view(torch.int64)) for a, b in zip(after, before, strict=True)]
    return raised, bool(bits) and all(torch.equal(a, b) for a, b in bits)


def _nothing_to_learn(ctx: Context) -> tuple[list[float], list[str], bool]:
    """Labels that are all -100, on one replica of two and then on all."""
    fabric, model, optimizer = ready(ctx, tp=2, pp=1)
    kwargs = fabric.strategy.distributed_sampler_kwargs
    batch = batches(1)[0]
    losses, finite = [], True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for blank in (slice(0, 2), slice(0, 4)):
            labels = batch["labels"].clone()
            labels[blank] = -100
            loss = model(**rows_of({**batch, "labels": labels}, kwargs["rank"], 2)).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            finite = finite and all(bool(p.isfinite().all()) for p in model.parameters())
    return losses, [str(w.message) for w in caught], finite


def _nobody_was_ended_for_it(ctx: Context) -> float:
    """A failure that is published ends its rank after five seconds."""
    begin = time.monotonic()
    time.sleep(6.0)
    fabric, model, _ = ready(ctx)
    fabric.backward(model(**batches(1)[0]).loss)
    return time.monotonic() - begin


AT_THE_BATCH = (
    _an_empty_batch,
    _other_ids_on_one_rank,
    _rows_that_do_not_match,
    _a_backward_of_another_tensor,
    _a_second_backward,
    _a_cache,
    _no_cache,
    _a_norm_that_is_not_finite,
    _nothing_to_learn,
)


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return world(4, *AT_THE_BATCH, _nobody_was_ended_for_it)


def test_an_empty_batch_is_refused(runs: dict[str, list[Any]]) -> None:
    for results in zip(*good(runs["an_empty_batch"]), strict=True):
        same_error(list(results), "BatchError", "is empty")


def test_other_ids_within_a_replica_are_refused(runs: dict[str, list[Any]]) -> None:
    whole, two_replicas = zip(*good(runs["other_ids_on_one_rank"]), strict=True)
    message = "different batches.*distributed_sampler_kwargs"
    same_error(list(whole), "BatchError", message)
    # Ranks 2 and 3 are the other replica: only they can know.
    same_error(list(two_replicas[2:]), "BatchError", message)
    assert two_replicas[:2] == (None, None)


def test_ragged_batches_are_refused(runs: dict[str, list[Any]]) -> None:
    same_error(runs["rows_that_do_not_match"], "BatchError", "labels has shape.*4 rows")


def test_a_foreign_loss_is_refused(runs: dict[str, list[Any]]) -> None:
    results = runs["a_backward_of_another_tensor"]
    same_error(results, "BatchError", "does not come from a pipelined call.*loss_fn")


def test_a_second_backward_is_refused(runs: dict[str, list[Any]]) -> None:
    same_error(runs["a_second_backward"], "RuntimeError", "second time.*Call the model again")


def test_generation_is_refused_on_a_pipeline(runs: dict[str, list[Any]]) -> None:
    same_error(runs["a_cache"], "NotImplementedError", "pp=2.*generate")


def test_generation_without_a_cache_is_that_of_one_process(runs: dict[str, list[Any]]) -> None:
    batch = batches(1)[0]
    alone = tiny_model("llama").generate(
        batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=4
    )
    for tokens in good(runs["no_cache"]):
        assert torch.equal(tokens, alone)


def test_a_norm_that_is_not_finite_is_refused(runs: dict[str, list[Any]]) -> None:
    ranks = good(runs["a_norm_that_is_not_finite"])
    same_error([raised for raised, _ in ranks], "RuntimeError", "none was changed")
    assert all(same for _, same in ranks)


def test_labels_that_say_nothing_are_a_loss_of_zero(runs: dict[str, list[Any]]) -> None:
    for losses, messages, finite in good(runs["nothing_to_learn"]):
        assert losses[0] > 0
        assert losses[1] == 0.0
        assert len(messages) == 1
        assert "-100" in messages[0]
        assert finite


def test_nobody_was_ended_for_it(runs: dict[str, list[Any]]) -> None:
    good(runs["nobody_was_ended_for_it"])
