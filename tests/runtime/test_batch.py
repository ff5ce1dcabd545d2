"""Batches by name, and the proof that the ranks of one replica hold the same one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from goose_strategy.errors import BatchError
from goose_strategy.runtime.batch import (
    BatchGuard,
    Binder,
    _fingerprint,
    check_not_empty,
    join_logits,
    refuse_cache,
)
from tests.harness.models import batches
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import mesh_of, message


def forward(input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> None:
    """A model's forward."""


def test_arguments_get_their_names() -> None:
    bind = Binder(forward)
    assert bind((1, 2), {"labels": 3, "more": 4, "nothing": None}) == {
        "input_ids": 1,
        "attention_mask": 2,
        "labels": 3,
        "more": 4,
    }
    assert list(bind.signature.parameters)[:2] == ["input_ids", "attention_mask"]


def test_arguments_that_cannot_be_are_refused_as_by_python() -> None:
    bind = Binder(forward)
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        bind((1,), {"input_ids": 1})
    with pytest.raises(TypeError, match="takes 4 arguments, not 5"):
        bind((1, 2, 3, 4, 5), {})


def test_an_empty_batch_is_named() -> None:
    check_not_empty({"input_ids": torch.ones(1, 1), "scale": torch.ones(()), "flag": True})
    with pytest.raises(BatchError, match=r"labels has shape \(0, 3\): the batch is empty"):
        check_not_empty({"labels": torch.ones(0, 3)})


class Cache:
    def get_seq_length(self) -> int:
        return 0


@pytest.mark.parametrize("cache", [{"past_key_values": ()}, {"anything": Cache()}])
def test_a_cache_is_refused(cache: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=r"pp=2.*use_cache=False"):
        refuse_cache({"input_ids": torch.ones(1, 1), **cache}, 2)
    refuse_cache({"input_ids": torch.ones(1, 1), "use_cache": False}, 2)


def test_logits_are_joined_where_they_fit() -> None:
    joined = join_logits([torch.ones(1, 2, 3), torch.zeros(2, 2, 3)])
    assert joined.shape == (3, 2, 3)
    ragged = join_logits([torch.ones(1, 2, 3), torch.zeros(2, 4, 3)])
    assert [logits.shape[1] for logits in ragged] == [2, 4]


BASE = {"input_ids": torch.tensor([[3, 4], [5, 6]]), "attention_mask": torch.ones(2, 2)}


@pytest.mark.parametrize(
    "other",
    [
        {**BASE, "input_ids": torch.tensor([[3, 4], [5, 7]])},
        {**BASE, "input_ids": torch.tensor([[5, 6], [3, 4]])},
        {**BASE, "input_ids": torch.tensor([[3, 4, 5, 6]])},
        {**BASE, "attention_mask": torch.tensor([[1.0, 1.0], [1.0, 0.5]])},
        {**BASE, "labels": torch.tensor([[-100]])},
        {"input_ids": BASE["input_ids"]},
        {"ids_input": BASE["input_ids"], "attention_mask": BASE["attention_mask"]},
    ],
    ids=["value", "order", "shape", "fraction", "one more", "one less", "name"],
)
def test_any_difference_shows_in_the_fingerprint(other: dict[str, Tensor]) -> None:
    assert not torch.equal(_fingerprint(BASE), _fingerprint(other))


def test_equal_batches_have_equal_fingerprints() -> None:
    copy = {name: BASE[name].clone() for name in reversed(BASE)}
    assert torch.equal(_fingerprint(BASE), _fingerprint({**copy, "return_dict": True}))


def test_every_token_counts() -> None:
    base = batches(1, batch_size=4, seq_len=32)[0]
    reference = _fingerprint(base)
    for row in range(4):
        for column in range(32):
            for step in (1, -1):
                ids = base["input_ids"].clone()
                ids[row, column] += step
                assert not torch.equal(reference, _fingerprint({**base, "input_ids": ids}))


# -- over the ranks of a replica ----------------------------------------------------------------


def _compared(ctx: Context) -> dict[str, Any]:
    batch = batches(1)[0]
    other = batches(1, seed=ctx.rank)[0]
    watched: list[str] = []
    results: dict[str, Any] = {}

    @contextmanager
    def watch(what: str) -> Iterator[None]:
        watched.append(what)
        yield

    with mesh_of(tp=2) as mesh:
        guard = BatchGuard(mesh, watch)
        (kept,) = guard([batch])
        results["same object"] = kept is batch
        results["values"] = message(lambda: guard([other]), BatchError)
        longer = {**batch, "more": torch.ones(1 + ctx.rank)}
        results["shapes"] = message(lambda: guard([longer]), BatchError)
        results["number"] = message(lambda: guard([batch] * (1 + ctx.rank)), BatchError)
        guard.mode = "broadcast"
        (sent,) = guard([{**other, "flag": ctx.rank}])
        results["sent"] = all(torch.equal(sent[name], batch[name]) for name in batch)
        results["flag"] = sent["flag"]
    with mesh_of(dp=2) as mesh:
        replica = BatchGuard(mesh)
        results["replicas"] = replica([other])[0] is other
    results["watched"] = watched
    return results


def test_the_ranks_of_a_replica_hold_the_same_batch() -> None:
    for rank in run_ranks(_compared, 2):
        assert rank["same object"]
        for case in ("values", "shapes", "number"):
            assert "different batches" in rank[case]
            assert "rank 0: " in rank[case]
            assert "rank 1: " in rank[case]
        assert rank["sent"]
        assert rank["flag"] == 0
        assert set(rank["watched"]) == {
            "comparison of the batches",
            "broadcast of the batch",
        }
        assert rank["replicas"], "replicas hold different batches on purpose"
