"""8-bit moments: codes with one scale per 64 elements.

bitsandbytes and torchao round both moments to nearest in blocks of 256. At beta2 = 0.999 a second
moment then shrinks by less than half a code per step and never falls. Here the code of the second
moment is the fourth root (a range of 255^4, so that small ones do not become zero) and is rounded
stochastically; its scale is fp32, because a bf16 scale freezes or adds noise in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops.layout import BLOCK
from cuda_ops.reference.roots import root32
from cuda_ops.reference.rounding import bits

_LARGEST_E4M3 = 448.0
_LARGEST_CODE = 255.0
_SMALLEST_NORMAL = 2.0**-126


def encode_first(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes, rounded to nearest even, and bf16 scales, rounded up.

    Args:
        values: ``[b, 64]`` fp32.

    Returns:
        ``[b, 64]`` float8_e4m3fn and ``[b]`` bf16. Blocks below 5e-36 become zero.
    """
    largest = values.abs().amax(dim=1) * (1.0 / _LARGEST_E4M3)
    u = (bits(largest) + 0xFFFF) & -0x10000
    u = torch.where((u & 0x7F800000) == 0x7F800000, 0x7F7F0000, u)
    scale = torch.where(largest < _SMALLEST_NORMAL, 0, u).view(torch.float32)
    codes = (values * _inverse(scale)[:, None]).clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
    return codes.to(torch.float8_e4m3fn), (u_to_bf16(scale))


def decode_first(codes: Tensor, scales: Tensor) -> Tensor:
    """Return ``[b, 64]`` fp32 from the codes and scales of ``encode_first``."""
    return codes.view(-1, BLOCK).to(torch.float32) * scales.to(torch.float32)[:, None]


def encode_second(values: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes of the fourth root and fp32 scales.

    Args:
        values: ``[b, 64]`` fp32, not negative.
        random: ``[b, 64]`` int32 in ``[0, 65536)``; ``None`` rounds to nearest.

    Returns:
        ``[b, 64]`` uint8 and ``[b]`` fp32. The code of a positive value is at least 1.
    """
    root = root32(root32(values))
    scale = root.amax(dim=1) * (1.0 / _LARGEST_CODE)
    fraction = 0.5 if random is None else random.to(torch.float32) * (1.0 / 65536.0)
    codes = (root * _inverse(scale)[:, None] + fraction).to(torch.int32)
    codes = codes.clamp(max=int(_LARGEST_CODE)).maximum((root > 0).to(torch.int32))
    return codes.to(torch.uint8), scale


def decode_second(codes: Tensor, scales: Tensor) -> Tensor:
    """Return ``[b, 64]`` fp32 from the codes and scales of ``encode_second``."""
    root = codes.view(-1, BLOCK).to(torch.float32) * scales[:, None]
    square = root * root
    return square * square


def u_to_bf16(values: Tensor) -> Tensor:
    """Cut fp32 values, whose lower 16 bits are zero, to bf16."""
    return (bits(values) >> 16).to(torch.int16).view(torch.bfloat16)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale.reciprocal(), 0.0)
