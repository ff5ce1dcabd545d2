from __future__ import annotations

import torch

from cuda_ops.bench.cases import equal_bits
from cuda_ops.reference.rounding import (
    bits,
    join8,
    join16,
    nearest_bf16,
    split8,
    split16,
    stochastic_bf16,
)
from tests.cuda_ops.test_equal_bits import any_floats


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16).to(torch.int32) & 0xFFFF


def test_nearest_is_ieee() -> None:
    values = any_floats()
    finite = ~values.isnan()
    assert equal_bits(nearest_bf16(values)[finite], values[finite].bfloat16())
    assert set(raw(nearest_bf16(values)[~finite]).tolist()) == {0x7FC0}


def test_split16_is_exact_and_differs_from_nearest_even_in_ties_only() -> None:
    values = any_floats()
    values = values[~values.isnan()]
    high, rest = split16(values)
    assert equal_bits(join16(high, rest), values)
    different = raw(high) != raw(values.bfloat16())
    assert bool(different.any())
    assert set((bits(values[different]) & 0xFFFF).tolist()) == {0x8000}


def test_nan_never_becomes_minus_zero() -> None:
    # The canonical NaN of CUDA: its lower half carries into the sign where halves are just added.
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(
        torch.float32
    )
    assert bool(nans.isnan().all())
    zeros = torch.zeros(4, dtype=torch.int32)
    for rounded in (
        nearest_bf16(nans),
        stochastic_bf16(nans, zeros + 0xFFFF),
        split16(nans)[0],
        split8(nans, zeros + 0xFF)[0],
        split8(nans, None)[0],
    ):
        assert bool(rounded.isnan().all())
    careless = (bits(nans) + 0x8000) >> 16
    assert -0x8000 in careless.to(torch.int16).tolist()


def test_stochastic_rounding_is_between_neighbours_and_unbiased() -> None:
    value = torch.tensor([1.0 + 3 / 1024])  # 3/8 between two bf16 numbers
    draws = torch.arange(65536, dtype=torch.int32)
    rounded = stochastic_bf16(value.expand(65536), draws).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 1 / 128}
    assert float(rounded.double().mean()) == float(value)


def test_stochastic_rounding_keeps_finite_values_finite() -> None:
    largest = torch.full((2,), torch.finfo(torch.float32).max) * torch.tensor([1.0, -1.0])
    up = torch.full((2,), 0xFFFF, dtype=torch.int32)
    assert bool(stochastic_bf16(largest, up).isfinite().all())
    assert bool(join8(*split8(largest, up)).isfinite().all())
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert equal_bits(stochastic_bf16(infinite, up).float(), infinite)
    assert equal_bits(join8(*split8(infinite, up)), infinite)


def test_split8_keeps_24_bits_without_bias() -> None:
    value = torch.tensor([1.0 + 5 * 2.0**-23])  # 5/256 between two values of 16 bits
    draws = torch.arange(256, dtype=torch.int32)
    joined = join8(*split8(value.expand(256), draws))
    assert set(joined.tolist()) == {1.0, 1.0 + 2.0**-15}
    assert float(joined.double().mean()) == float(value)
    values = torch.randn(10000, generator=torch.Generator().manual_seed(0))
    error = (join8(*split8(values, None)) - values).abs() / values.abs()
    assert float(error.max()) <= 2.0**-16
