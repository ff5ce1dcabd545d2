"""The sum over dp after an all-to-all: bf16 on the wire, fp32 in the sum."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops.layout import CHUNK, Segments
from cuda_ops.reference.norm import sum_of_squares
from cuda_ops.reference.rounding import nearest_bf16

_SLICE = 64 * CHUNK


def unpack(
    received: Tensor, out: Tensor, scale: Tensor | None, segments: Segments, partials: Tensor
) -> None:
    """Add what all ranks sent and take the norm of the sum.

    Args:
        received: bf16 ``[dp, n]``.
        out: fp32 or bf16 ``[n]``: ``scale`` times the sum in rank order.
        scale: fp32 ``[1]``, or ``None`` for 1.
        segments: What lies where.
        partials: fp64 ``[chunks]``: sums of squares of ``out``.
    """
    for begin in range(0, segments.numel, _SLICE):
        where = slice(begin, min(begin + _SLICE, segments.numel))
        total = received[0, where].to(torch.float32)
        for row in received[1:, where]:
            total = total + row.to(torch.float32)
        if scale is not None:
            total = total * scale
        out[where] = nearest_bf16(total) if out.dtype == torch.bfloat16 else total
    sum_of_squares(out, segments, partials)
