"""Errors that make private training silently wrong are found by what the other tests compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import goose_strategy.privacy.release as release_module
import goose_strategy.runtime.private as private_module
from goose_strategy.grads.products import ProductOwed
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.privacy.clipping import SampleClipping
from goose_strategy.privacy.noise import Noise
from goose_strategy.privacy.rules import EmbeddingRule, ProductRule
from goose_strategy.tensor_parallel.loss import CausalLMLoss
from tests.parity.grid import Plant
from tests.privacy.oracle import PrivateCase, assert_same, reference_call, run_call
from tests.privacy.test_parity import BATCH, clipped
from tests.privacy.test_release import NOISY, assert_noise, noisy_call

LLAMA = PrivateCase(tied=True, pp=2, schedule="ZBH1")
QWEN3 = PrivateCase(family="qwen3", tp=2)
GPT2 = PrivateCase(family="gpt2", tp=2)


@contextmanager
def no_cross_term(_: ParallelMesh) -> Iterator[None]:
    with patch.object(SampleClipping, "_note_tied", lambda *_args: None):
        yield


def _kinds(change: dict[str, str]) -> Plant:
    """Return a plant that takes parameters of one kind for another."""

    @contextmanager
    def planted(_: ParallelMesh) -> Iterator[None]:
        shares = SampleClipping._share_of

        def wrong(self: SampleClipping, param: Tensor) -> Any:
            share = shares(self, param)
            return replace(share, kind=change.get(share.kind, share.kind))

        with patch.object(SampleClipping, "_share_of", wrong):
            yield

    return planted


@contextmanager
def norms_summed_once_per_rank(mesh: ParallelMesh) -> Iterator[None]:
    """q and k norms count as those of one rank."""
    with _kinds({"partial": "replicated"})(mesh):
        yield


@contextmanager
def replicated_twice(mesh: ParallelMesh) -> Iterator[None]:
    with _kinds({"replicated": "shard"})(mesh):
        yield


@contextmanager
def squares_before_the_sum(mesh: ParallelMesh) -> Iterator[None]:
    with _kinds({"partial": "shard"})(mesh):
        yield


@contextmanager
def bias_left_out(_: ParallelMesh) -> Iterator[None]:
    squares = ProductRule.squares

    def wrong(self: ProductRule, owed: ProductOwed, *args: Any) -> Any:
        found = list(squares(self, owed, *args))
        if owed.bias is not None:
            found[-1] = torch.zeros_like(found[-1])
        return found

    with patch.object(ProductRule, "squares", wrong):
        yield


@contextmanager
def repeated_tokens_apart(_: ParallelMesh) -> Iterator[None]:
    """The squares of a row that is looked up twice are added, not squared together."""

    def wrong(self: EmbeddingRule, owed: Any, rows: int, *_args: Any) -> Any:
        return [torch.flatten(owed.grad.square(), 1).sum(1).view(rows)]

    with patch.object(EmbeddingRule, "squares", wrong):
        yield


@contextmanager
def factors_of_another_microbatch(_: ParallelMesh) -> Iterator[None]:
    factors = SampleClipping._factors
    former: list[Tensor] = []

    def wrong(self: SampleClipping, record: Any) -> Tensor:
        former.append(factors(self, record))
        return former[-2:][0] if former[-2:][0].shape == former[-1].shape else former[-1]

    with patch.object(SampleClipping, "_factors", wrong):
        yield


@contextmanager
def local_norms(mesh: ParallelMesh) -> Iterator[None]:
    """Every stage clips by the norm of its own part."""
    norms, mesh.norms = mesh.norms, None
    yield
    mesh.norms = norms


@contextmanager
def mean_over_replicas(_: ParallelMesh) -> Iterator[None]:
    from goose_strategy.data_parallel.reducer import Reducer

    begin = Reducer.begin_call

    def wrong(self: Reducer, sync: bool) -> Any:
        for bucket in self.buckets:
            bucket.grads._replicas = self.mesh.dp_size
        return begin(self, sync)

    with patch.object(Reducer, "begin_call", wrong):
        yield


@contextmanager
def one_mean_over_tokens(_: ParallelMesh) -> Iterator[None]:
    call = CausalLMLoss.__call__

    def wrong(self: CausalLMLoss, *args: Any, **kwargs: Any) -> Tensor:
        return call(replace(self, per_sample=None), *args, **kwargs)

    with patch.object(CausalLMLoss, "__call__", wrong):
        yield


NORMS: dict[str, tuple[PrivateCase, Plant]] = {
    "cross term dropped": (LLAMA, no_cross_term),
    "cross term dropped on one rank": (PrivateCase(tied=True), no_cross_term),
    "q and k norms of one rank": (QWEN3, norms_summed_once_per_rank),
    "squares before the sum over tp": (QWEN3, squares_before_the_sum),
    "replicated twice": (QWEN3, replicated_twice),
    "bias left out": (GPT2, bias_left_out),
    "repeated tokens apart": (PrivateCase(), repeated_tokens_apart),
    "factors of another microbatch": (LLAMA, factors_of_another_microbatch),
    "norms of one stage": (LLAMA, local_norms),
    "a mean over replicas": (PrivateCase(dp=2), mean_over_replicas),
    "a mean over tokens": (PrivateCase(), one_mean_over_tokens),
}


@cache
def _assert_unharmed(case: PrivateCase) -> None:
    assert_same(run_call(case, BATCH), reference_call(case, BATCH), 1e-9)


@pytest.mark.parametrize("planted", NORMS)
def test_an_error_in_norms_or_sums_is_found(planted: str) -> None:
    case, plant = NORMS[planted]
    case = clipped(case, "some")
    theirs = reference_call(case, BATCH)
    _assert_unharmed(case)
    with pytest.raises(AssertionError, match=r"(is|are) .* off|another loss|other norms"):
        # Every one of them must stand out of fp32, too: the bound of the issue.
        assert_same(run_call(case, BATCH, plant, by_stage=True), theirs, 1e-5)


def _renamed(name_of: Callable[[ParallelMesh], str]) -> Plant:
    @contextmanager
    def planted(mesh: ParallelMesh) -> Iterator[None]:
        add = Noise.add

        def wrong(self: Noise, target: Tensor, scale: float, *, name: str, **rest: Any) -> None:
            add(self, target, scale, name=name + name_of(mesh), **rest)

        with patch.object(Noise, "add", wrong):
            yield

    return planted


@contextmanager
def one_slice_without(mesh: ParallelMesh) -> Iterator[None]:
    if mesh.dp_rank != 1:
        yield
        return
    with patch.object(Noise, "add", lambda *_args, **_kwargs: None):
        yield


@contextmanager
def noise_per_stage(mesh: ParallelMesh) -> Iterator[None]:
    with _renamed(lambda mesh: f"stage {mesh.pp_rank}")(mesh):
        yield


@contextmanager
def noise_per_replica(mesh: ParallelMesh) -> Iterator[None]:
    """Every replica adds noise of its own, as if each released its sum."""
    privatize = release_module.privatize

    def twice(buckets: Any, *args: Any) -> None:
        found = list(buckets)
        privatize(found, *args)
        # As large as noise that was added before the sum over replicas.
        for bucket in found:
            noise = torch.randn(bucket.grads.own.shape, dtype=torch.float64)
            bucket.grads.own.add_(noise.to(bucket.grads.own.dtype))

    with patch.object(private_module, "privatize", twice):
        yield


NOISES: dict[str, Plant] = {
    "one slice without": one_slice_without,
    "noise per stage": noise_per_stage,
    "noise per replica": noise_per_replica,
}


@pytest.mark.parametrize("planted", NOISES)
def test_an_error_in_the_noise_is_found(planted: str) -> None:
    assert_noise(NOISY, noisy_call(NOISY))
    with pytest.raises(AssertionError):
        assert_noise(NOISY, noisy_call(NOISY, NOISES[planted]))
