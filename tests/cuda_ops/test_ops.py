"""Calls check their arguments, and take the library that fits, or pure torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cuda_ops import ops
from cuda_ops.bench.cases import (
    NUMEL,
    SEGMENTS,
    Variant,
    differences,
    gradients,
    initial,
    train,
)
from cuda_ops.bindings import Library
from cuda_ops.layout import Main, Moment, Segment, Segments, Shard, chunks_of
from cuda_ops.load import library_for
from cuda_ops.reference.calls import Reference
from cuda_ops.state import Algorithm, StepState

ADAM = Variant(Algorithm.ADAM, Main.SPLIT16, Moment.BF16, Moment.BF16, torch.bfloat16)


class Ops:
    """``ops`` with the positional calls of an implementation."""

    def sum_of_squares(self, grad: Any, segments: Any, out: Any) -> None:
        ops.sum_of_squares(grad, segments, out=out)

    def reduce_partials(self, partials: Any, out: Any) -> None:
        ops.reduce_partials(partials, out=out)

    def prepare(self, state: Any, norm2: Any, max_norm: float, scale: Any) -> None:
        ops.prepare(state, norm2, max_norm=max_norm, scale=scale)

    def step(self, shard: Any, grad: Any, segments: Any, state: Any) -> None:
        ops.step(shard, grad, segments=segments, state=state)

    def split_main(self, shard: Any, values: Any) -> None:
        ops.split_main(shard, values)


@pytest.fixture(params=["compiled", "pure torch"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either implementation; the name of the one that is called."""
    chosen = request.getfixturevalue("cpu") if request.param == "compiled" else None
    monkeypatch.setattr(ops, "library_for", lambda device: chosen)
    return str(request.param)


def test_both_give_the_same_bits(taken: str) -> None:
    assert differences(train(Ops(), ADAM), train(Reference(), ADAM)) == []


def test_what_is_found_is_what_is_called(cpu: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(ops, "library_for", lambda device: called.append(device) or cpu)
    ops.reduce_partials(torch.ones(1, dtype=torch.float64), out=torch.ones(1, dtype=torch.float64))
    assert called == [torch.device("cpu")]


def test_moments_return(taken: str) -> None:
    values = torch.rand(NUMEL, generator=torch.Generator().manual_seed(0))
    shard = Shard.allocate(NUMEL, main=Main.BF16, exp_avg=Moment.BLOCK8, exp_avg_sq=Moment.BLOCK8)
    assert shard.exp_avg is not None
    assert shard.exp_avg_sq is not None
    for codes, scales in (
        (shard.exp_avg, shard.exp_avg_scale),
        (shard.exp_avg_sq, shard.exp_avg_sq_scale),
    ):
        ops.write_moment(values, codes, scales)
        assert float((ops.read_moment(codes, scales) - values).abs().max()) < 0.04
    ops.split_main(shard, values)
    assert float((ops.join_main(shard) - values).abs().max()) < 0.004


def good() -> dict[str, Any]:
    return {
        "segments": Segments.build(NUMEL, SEGMENTS),
        "grad": gradients(ADAM, 1)[0],
        "partials": torch.empty(chunks_of(NUMEL), dtype=torch.float64),
        "norm2": torch.ones(1, dtype=torch.float64),
        "shard": Shard.allocate(
            NUMEL, main=Main.SPLIT16, exp_avg=Moment.BF16, exp_avg_sq=Moment.BF16
        ),
        "state": StepState.allocate(Algorithm.ADAM, 2),
    }


Call = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda a: ops.sum_of_squares(a["grad"].half(), a["segments"], out=a["partials"]),
            "grad has dtype torch.float16; allowed",
        ),
        (
            lambda a: ops.sum_of_squares(a["grad"][64:], a["segments"], out=a["partials"]),
            r"grad has shape \(6528,\); \(6592,\) is needed",
        ),
        (
            lambda a: ops.sum_of_squares(a["grad"], a["segments"], out=a["partials"][1:]),
            r"out has shape \(3,\); \(4,\)",
        ),
        (
            lambda a: ops.reduce_partials(a["partials"], out=torch.ones(1)),
            "out has dtype torch.float32",
        ),
        (lambda a: ops.prepare(a["state"], a["norm2"], max_norm=-1.0), "max_norm=-1.0: a positive"),
        (lambda a: ops.prepare(a["state"], a["norm2"], max_norm=float("nan")), "max_norm=nan"),
        (
            lambda a: ops.prepare(a["state"], a["norm2"], scale=a["norm2"]),
            "scale has dtype torch.float64",
        ),
        (
            lambda a: ops.step(
                Shard.allocate(64, main=Main.BF16, exp_avg=Moment.BF16, exp_avg_sq=Moment.BF16),
                a["grad"],
                segments=a["segments"],
                state=a["state"],
            ),
            "a shard of 64 elements, segments of 6592",
        ),
        (
            lambda a: ops.step(
                a["shard"],
                a["grad"],
                segments=a["segments"],
                state=StepState.allocate(Algorithm.LION, 2),
            ),
            "algorithm=LION with exp_avg=bf16 and exp_avg_sq=bf16",
        ),
        (lambda a: ops.split_main(a["shard"], initial(64)), r"values has shape \(64,\)"),
        (
            lambda a: ops.write_moment(initial(), a["shard"].exp_avg, torch.zeros(3)),
            "a moment of torch.bfloat16 with scales=True",
        ),
        (
            lambda a: ops.read_moment(torch.zeros(64, dtype=torch.uint8)),
            "a moment of torch.uint8 with scales=False",
        ),
        (
            lambda a: ops.unpack(
                a["grad"],
                out=initial(),
                scale=None,
                segments=a["segments"],
                partials=a["partials"],
            ),
            r"received has shape \(6592,\); \(dp, 6592\)",
        ),
        (
            lambda a: ops.unpack(
                initial()[None],
                out=initial(),
                scale=None,
                segments=a["segments"],
                partials=a["partials"],
            ),
            "received has dtype torch.float32",
        ),
    ],
)
def test_wrong_arguments_are_refused_before_anything_changes(call: Call, words: str) -> None:
    arguments = good()
    before = arguments["shard"].weight.clone(), arguments["state"].counters.clone()
    with pytest.raises(ValueError, match=words):
        call(arguments)
    assert torch.equal(arguments["shard"].weight, before[0])
    assert torch.equal(arguments["state"].counters, before[1])


def test_groups_and_ranks_without_elements(taken: str) -> None:
    empty = Segments.build(0, [])
    shard = Shard.allocate(0, main=Main.SPLIT8, exp_avg=Moment.BLOCK8, exp_avg_sq=Moment.BLOCK8)
    state = StepState.allocate(Algorithm.ADAM, 1)
    norm2 = torch.full((1,), 9.0, dtype=torch.float64)
    partials = torch.empty(0, dtype=torch.float64)
    grad = torch.empty(0)
    ops.split_main(shard, grad)
    ops.sum_of_squares(grad, empty, out=partials)
    ops.reduce_partials(partials, out=norm2)
    assert float(norm2) == 0.0
    ops.prepare(state, norm2, max_norm=1.0)
    ops.step(shard, grad, segments=empty, state=state)
    # The step is counted where nothing is owned, too: bias corrections agree on all ranks.
    assert int(state.step) == 1
    assert ops.join_main(shard).numel() == 0


def test_the_fallback_is_pure_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_OPS", "off")
    library_for.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            out = torch.empty(1, dtype=torch.float64)
            ops.reduce_partials(torch.ones(3, dtype=torch.float64), out=out)
    finally:
        library_for.cache_clear()
    assert float(out) == 3.0


def test_one_segment_may_hold_everything(taken: str) -> None:
    grad = torch.ones(2048 * 70)
    partials = torch.empty(70, dtype=torch.float64)
    ops.sum_of_squares(grad, Segments.build(len(grad), [Segment(start=0)]), out=partials)
    assert bool((partials == 2048).all())
