from __future__ import annotations

import pytest
import torch

from cuda_ops.layout import BLOCK
from cuda_ops.reference.blocks import (
    decode_first,
    decode_second,
    encode_first,
    encode_second,
)


def lognormal(blocks: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(torch.randn(blocks, BLOCK, generator=generator) * 1.5)


def draws(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 65536, like.shape, dtype=torch.int32, generator=generator)


def test_first_moments_are_within_half_a_code() -> None:
    values = lognormal(64) * torch.randn(64, BLOCK, generator=torch.Generator().manual_seed(1))
    decoded = decode_first(*encode_first(values)).view_as(values)
    largest = values.abs().amax(dim=1, keepdim=True)
    # Three bits of mantissa, or the smallest step of e4m3 for the small ones of a block.
    bound = torch.maximum(values.abs() / 16, largest * (2.0**-10 / 448) * 1.01)
    assert bool(((decoded - values).abs() <= bound).all())


def test_second_moments_are_between_neighbouring_codes() -> None:
    values = lognormal(64) ** 2
    generator = torch.Generator().manual_seed(2)
    codes, scales = encode_second(values, draws(values, generator))
    root = values.double() ** 0.25
    step = scales.double()[:, None]
    assert bool((codes.double() * step <= (root + step) * (1 + 1e-6)).all())
    assert bool((codes.double() * step >= (root - step) * (1 - 1e-6)).all())


def test_a_positive_second_moment_never_becomes_zero() -> None:
    values = torch.full((1, BLOCK), 1e-30)
    values[0, 0] = 1.0
    values[0, 1] = 0.0
    codes, scales = encode_second(values, torch.zeros(1, BLOCK, dtype=torch.int32))
    decoded = decode_second(codes, scales)[0]
    assert float(decoded[1]) == 0.0
    assert bool((decoded[2:] > 0).all())


@pytest.mark.parametrize("size", [0.0, 1e-40, 4e-36, 1e-30, 1e30, 3e38])
def test_blocks_of_any_size(size: float) -> None:
    values = torch.full((1, BLOCK), size)
    first = decode_first(*encode_first(values))
    second = decode_second(*encode_second(values, None))
    for decoded in (first, second):
        assert bool(decoded.isfinite().all())
    # Below the smallest normal scale a first moment is zero, which no update notices.
    expected = 0.0 if size < 5e-36 else size
    assert float(first[0, 0]) == pytest.approx(expected, rel=0.07)
    assert float(second[0, 0]) == pytest.approx(size, rel=1e-3, abs=1e-43)


def follow(encode: str, steps: int) -> torch.Tensor:
    """Return sqrt(v / v of fp32), of half of each block, after its gradients fell to a tenth."""
    generator = torch.Generator().manual_seed(3)
    sizes = lognormal(16)
    falls = torch.rand(16, BLOCK, generator=generator) < 0.5
    v, exact = torch.zeros(16, BLOCK), torch.zeros(16, BLOCK)
    for step in range(steps):
        grad = torch.randn(16, BLOCK, generator=generator) * sizes
        square = torch.where(falls & (step >= 300), grad * 0.1, grad) ** 2
        exact = exact * 0.999 + 0.001 * square
        v = v * 0.999 + 0.001 * square
        random = draws(v, generator) if encode == "stochastic" else None
        v = decode_second(*encode_second(v, random))
    return (v / exact).sqrt()[falls]


def test_second_moments_follow_a_falling_gradient() -> None:
    ratio = follow("stochastic", 3000)
    assert float(ratio.median()) == pytest.approx(1.0, abs=0.1)
    assert float(ratio.quantile(0.05)) > 0.5
    assert float(ratio.quantile(0.95)) < 2.0


def test_rounding_to_nearest_would_freeze_them() -> None:
    assert float(follow("nearest", 3000).median()) > 2.5
