"""Rounding fp32 to fewer bits, by integer arithmetic on the bits.

Casts of torch round to nearest, and what they make of NaN depends on the kernel that ran. These
functions define every bit, so that CPU, GPU and compiled code agree. A NaN becomes the quiet NaN
``0x7fc0``: adding to its bits, as other split optimizers do, can turn it into -0.0.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPONENT = 0x7F800000
_ABSOLUTE = 0x7FFFFFFF
_QUIET_NAN = 0x7FC0


def bits(values: Tensor) -> Tensor:
    """Return the bits of fp32 values as int32."""
    return values.contiguous().view(torch.int32)


def nearest_bf16(values: Tensor) -> Tensor:
    """Round fp32 to the nearest bf16, ties to even; overflow becomes inf, as in IEEE arithmetic."""
    u = bits(values)
    rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
    return _as_bf16(torch.where(_is_nan(u), _QUIET_NAN, rounded))


def stochastic_bf16(values: Tensor, random: Tensor) -> Tensor:
    """Round fp32 to bf16 up or down, with probabilities by distance; finite values stay finite.

    Args:
        values: fp32.
        random: int32 in ``[0, 65536)``, of the same shape.
    """
    u = bits(values)
    v = u + random
    v = torch.where((v & _EXPONENT) == _EXPONENT, u, v) >> 16
    v = torch.where((u & _ABSOLUTE) == _EXPONENT, u >> 16, v)
    return _as_bf16(torch.where(_is_nan(u), _QUIET_NAN, v))


def split16(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 into the nearest bf16, ties away from zero, and a signed 16-bit remainder.

    Exact for all but NaN. Ties cannot go to even: two values would share one split.

    Returns:
        bf16 and int16.
    """
    u = bits(values)
    nan = _is_nan(u)
    high = torch.where(nan, _QUIET_NAN, (u + 0x8000) >> 16)
    return _as_bf16(high), torch.where(nan, 0, u).to(torch.int16)


def join16(high: Tensor, rest: Tensor) -> Tensor:
    """Return the fp32 values of ``split16``."""
    u = (high.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    return u.view(torch.float32)


def split8(values: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round fp32 to 24 bits and split it into the nearest bf16 and a signed 8-bit remainder.

    Args:
        values: fp32.
        random: int32 of which the lower 8 bits are used; ``None`` rounds to nearest, ties away.

    Returns:
        bf16 and int8.
    """
    u = bits(values)
    v = u + (0x80 if random is None else random & 0xFF)
    v = torch.where((v & _EXPONENT) == _EXPONENT, u, v)
    special = (u & _EXPONENT) == _EXPONENT
    high = torch.where(special, u >> 16, (v + 0x8000) >> 16)
    high = torch.where(_is_nan(u), _QUIET_NAN, high)
    return _as_bf16(high), torch.where(special, 0, v >> 8).to(torch.int8)


def join8(high: Tensor, rest: Tensor) -> Tensor:
    """Return the fp32 values of ``split8``."""
    u = (high.view(torch.int16).to(torch.int32) << 16) + (rest.to(torch.int32) << 8)
    return u.view(torch.float32)


def _is_nan(u: Tensor) -> Tensor:
    return (u & _ABSOLUTE) > _EXPONENT


def _as_bf16(high: Tensor) -> Tensor:
    return high.to(torch.int16).view(torch.bfloat16)
