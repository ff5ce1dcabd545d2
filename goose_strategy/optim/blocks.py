"""8-bit moments out of a checkpoint and back, without changing a bit.

A checkpoint holds moments as fp32 numbers under the parameter's name, so that any preset and any
layout can read them. Encoding such numbers anew gives the same codes, but a scale that is off by
its last bit, because it is computed from a decoded number. The scale that decodes to exactly what
was saved is one of its neighbours, and is looked for; where there is none, the numbers came from
another preset (or another division over tp) and are encoded like any others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops import ops
from cuda_ops.layout import BLOCK

_NEIGHBOURS = range(-4, 5)
_CHUNK = 1 << 18


def restore_moment(values: Tensor, codes: Tensor, scales: Tensor | None) -> None:
    """Write a moment so that reading it gives the same numbers, wherever that is possible.

    Args:
        values: ``[n]`` fp32.
        codes: ``[n]``, the storage that is written.
        scales: ``[n / 64]``, its scales, if it has some.
    """
    ops.write_moment(values, codes, scales)
    if scales is None:
        return
    for begin in range(0, values.numel(), _CHUNK):
        part = slice(begin, min(begin + _CHUNK, values.numel()))
        blocks = slice(part.start // BLOCK, part.stop // BLOCK)
        _restore(values[part].view(-1, BLOCK), codes[part].view(-1, BLOCK), scales[blocks])


def _restore(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Replace the scales (and codes) of blocks by those that decode exactly."""
    words = torch.int32 if scales.dtype == torch.float32 else torch.int16
    wanted = (_decoded(codes, scales) != values).any(dim=1)
    first = scales.clone()
    for distance in _NEIGHBOURS:
        if not wanted.any():
            return
        # Scales are positive, so that neighbours are neighbouring integers.
        bits = (first.view(words) + distance).clamp_(min=0)
        trial = bits.to(words).view(scales.dtype)
        found = _codes_at(values, trial, codes.dtype)
        exact = wanted & (_decoded(found, trial) == values).all(dim=1)
        raw = codes.view(torch.uint8)
        raw.copy_(torch.where(exact[:, None], found.view(torch.uint8), raw))
        scales.copy_(torch.where(exact, trial, scales))
        wanted &= ~exact


def _codes_at(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest codes at given scales."""
    wide = scales.float()[:, None]
    inverse = torch.where(wide > 0, wide.reciprocal(), 0.0)
    if dtype == torch.uint8:
        return (values.sqrt().sqrt() * inverse + 0.5).clamp(0, 255).to(torch.uint8)
    return (values * inverse).clamp(-448.0, 448.0).to(dtype)


def _decoded(codes: Tensor, scales: Tensor) -> Tensor:
    return ops.read_moment(codes.reshape(-1), scales).view(codes.shape)
