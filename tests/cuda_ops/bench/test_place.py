"""Where a check runs: the card, the CPU in a dry run, or nowhere, and why."""

from __future__ import annotations

import pytest
import torch

from cuda_ops import sources
from cuda_ops.bench.cases import Variant
from cuda_ops.bench.place import Place, find_place, prepared, time_of
from cuda_ops.bindings import Library
from cuda_ops.layout import CHUNK, Main, Moment
from cuda_ops.reference.calls import Reference
from cuda_ops.state import Algorithm


def test_a_dry_run_compares_the_library_with_pure_torch(
    cpu: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "folders", lambda: (cpu.path.parent,))
    monkeypatch.delenv("CUDA_OPS", raising=False)
    place = find_place(dry=True)
    assert place.dry
    assert place.numel == 16 * CHUNK
    assert place.compiled.path == cpu.path
    assert isinstance(place.other, Reference)


def test_without_a_library_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_OPS", "off")
    with pytest.raises(RuntimeError, match="the CPU library does not run: CUDA_OPS=off"):
        find_place(dry=True)


def test_a_shard_is_ready_to_be_stepped() -> None:
    place = Place(torch.device("cpu"), 2 * CHUNK, Reference(), Reference())
    variant = Variant(Algorithm.ADAM, Main.FP32, Moment.FP32, Moment.FP32, torch.float32)
    shard, segments, state = prepared(place, variant)
    place.compiled.step(shard, torch.full((2 * CHUNK,), 1e-3), segments, state)
    assert not torch.equal(shard.exp_avg, torch.zeros_like(shard.exp_avg))


def test_a_call_takes_time() -> None:
    place = Place(torch.device("cpu"), CHUNK, None, None)
    calls = []
    assert time_of(place, lambda: calls.append(sum(range(10_000)))) > 0
    assert len(calls) == 2
