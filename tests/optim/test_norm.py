"""Sums of powers: exact, and the same in any order and any division."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from goose_strategy.optim.norm import (
    GRANULE,
    SIZE,
    _limbs,
    _spread_limbs,
    combined_power_sum,
    partial_power_sum,
)

CPU = torch.device("cpu")


def wild(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of very different sizes, zeros and denormal ones among them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    values *= torch.exp(6 * torch.randn(count, generator=generator, dtype=torch.float64))
    values[::7] = 0.0
    values[3] = 1e-41
    return values.to(dtype)


def whole(runs: list[Tensor], norm_type: float = 2.0) -> float:
    return combined_power_sum(partial_power_sum(runs, norm_type, CPU).view(1, -1), norm_type).item()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, 0.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_division_over_ranks_and_runs_gives_the_same_bits(
    dtype: torch.dtype, norm_type: float
) -> None:
    values = wild(64 * 257 + 11, dtype)
    expected = whole([values], norm_type)
    torch_s = torch.linalg.vector_norm(values.double(), norm_type).item()
    found = expected if math.isinf(norm_type) else expected ** (1 / norm_type)
    assert found == pytest.approx(torch_s, rel=1e-6)
    for size in (GRANULE, 3 * GRANULE, 100 * GRANULE):
        runs = list(values.split(size))
        ranks = [runs[0::3], runs[1::3], [], runs[2::3]]
        for order in (ranks, ranks[::-1]):
            parts = torch.stack([partial_power_sum(part, norm_type, CPU) for part in order])
            assert combined_power_sum(parts, norm_type).item() == expected


def test_the_sum_of_granules_is_exact() -> None:
    values = wild(4096, torch.float64)
    # One element per granule, so that nothing is rounded before the integers.
    granules = torch.zeros(4096, GRANULE, dtype=torch.float64)
    granules[:, 5] = values
    exact = sum((Fraction(abs(value)) for value in values.tolist()), Fraction(0))
    assert whole([granules.view(-1)], 1.0) == pytest.approx(float(exact), rel=3e-16)
    # What plain sums lose: a small number beside two that cancel nothing.
    assert whole([torch.tensor([2.0**60]), torch.ones(64) / 64, torch.tensor([2.0**60])], 1.0) == (
        2.0**61 + 1
    )


def test_very_large_and_very_small_numbers_have_a_place() -> None:
    for value in (1.7e308, 2.0**-1000, 1.0):
        assert whole([torch.tensor([value], dtype=torch.float64)], 1.0) == value


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_what_is_not_finite_is_told(value: float, norm_type: float) -> None:
    values = torch.ones(300)
    values[77] = value
    found = whole([torch.ones(64), values], norm_type)
    assert math.isnan(found) if math.isnan(value) else found == math.inf
    both = torch.stack([partial_power_sum([v], norm_type, CPU) for v in (torch.ones(9), values)])
    assert not math.isfinite(combined_power_sum(both, norm_type).item())


def test_nothing_has_the_norm_zero() -> None:
    for norm_type in (2.0, math.inf):
        assert whole([], norm_type) == 0.0
        assert whole([torch.zeros(0)], norm_type) == 0.0
    assert partial_power_sum([], 2.0, CPU).shape == (SIZE,)


def test_tables_for_devices_give_the_same_limbs() -> None:
    granules = wild(5003, torch.float64).abs()
    granules[11], granules[12] = math.nan, math.inf
    assert torch.equal(_spread_limbs(granules, 64), _limbs(granules))
