from __future__ import annotations

import math

import pytest
import torch

from cuda_ops.layout import CHUNK, Segment, Segments, chunks_of
from cuda_ops.reference.norm import reduce_partials, sum_of_squares

NUMEL = 3 * CHUNK + 64


def partials_of(grad: torch.Tensor, *segments: Segment) -> torch.Tensor:
    out = torch.empty(chunks_of(len(grad)), dtype=torch.float64)
    sum_of_squares(grad, Segments.build(len(grad), segments or [Segment(start=0)]), out)
    return out


def gradient(numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(4))


def test_it_is_the_sum_of_squares() -> None:
    out = torch.empty(1, dtype=torch.float64)
    reduce_partials(partials_of(gradient()), out)
    assert float(out) == pytest.approx(float(gradient().double().square().sum()), rel=1e-6)


def test_weights_count() -> None:
    grad = gradient()
    out = torch.empty(1, dtype=torch.float64)
    whole = partials_of(
        grad,
        Segment(start=0),
        Segment(start=64, norm_weight=0.0),
        Segment(start=CHUNK, norm_weight=0.25),
    )
    reduce_partials(whole, out)
    squares = grad.double().square()
    expected = squares[:64].sum() + 0.25 * squares[CHUNK:].sum()
    assert float(out) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_what_counts_nothing_still_reports(bad: float, weight: float) -> None:
    grad = gradient()
    grad[CHUNK + 70] = bad
    found = partials_of(grad, Segment(start=0), Segment(start=CHUNK + 64, norm_weight=weight))
    assert found.isfinite().tolist() == [True, False, True, True]


def test_partials_do_not_depend_on_the_cut() -> None:
    whole = partials_of(gradient(8 * CHUNK))
    for shards in (2, 4, 8):
        parts = [partials_of(part) for part in gradient(8 * CHUNK).chunk(shards)]
        assert torch.equal(torch.cat(parts), whole)


def test_a_large_shard_is_worked_off_in_slices() -> None:
    # Larger than one slice of the CPU.
    grad = gradient(200 * CHUNK)
    expected = torch.cat([partials_of(part) for part in grad.split(50 * CHUNK)])
    assert torch.equal(partials_of(grad), expected)


def test_no_gradients() -> None:
    out = torch.full((1,), 7.0, dtype=torch.float64)
    empty = torch.empty(0, dtype=torch.float64)
    sum_of_squares(torch.empty(0), Segments.build(0, []), empty)
    reduce_partials(empty, out)
    assert float(out) == 0.0
