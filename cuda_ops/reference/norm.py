"""Sums of squares in a tree that does not depend on where a shard ends.

``torch.sum`` chooses its order by size and device, so a norm changes with the number of ranks. Here
each chunk of 2048 elements has a partial sum of its own, equal bit for bit on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops.layout import BLOCK, CHUNK, Segments, chunks_of

_VECTOR = 8
_LANES = 32
_THREADS = CHUNK // _VECTOR
_REDUCE_THREADS = 1024
_SLICE = 64 * CHUNK


def sum_of_squares(grad: Tensor, segments: Segments, out: Tensor) -> None:
    """Write the weighted sum of squares of each chunk into ``out``, fp64 ``[chunks]``."""
    size = _SLICE if grad.device.type == "cpu" else 64 * _SLICE
    for begin in range(0, segments.numel, size):
        end = min(begin + size, segments.numel)
        blocks = torch.arange(begin, end, BLOCK, device=grad.device)
        segment = torch.searchsorted(segments.start, blocks, right=True) - 1
        weight = segments.norm_weight[segment].to(torch.float64)[:, None]
        x = grad[begin:end].to(torch.float32).view(-1, _VECTOR)
        sums = _fold(x * x).to(torch.float64).view(-1, BLOCK // _VECTOR)
        # x - x is 0, or NaN for inf and NaN: what counts nothing still reports them.
        weighed = torch.where(weight != 0, sums * weight, sums - sums)
        chunks = chunks_of(end - begin)
        padded = weighed.new_zeros(chunks * _THREADS)
        padded[: weighed.numel()] = weighed.view(-1)
        out[begin // CHUNK :][:chunks] = _block_sum(padded.view(chunks, _THREADS))


def reduce_partials(partials: Tensor, out: Tensor) -> None:
    """Add partial sums, fp64 ``[c]``, in a fixed tree into ``out``, fp64 ``[1]``."""
    rows = -(-partials.numel() // _REDUCE_THREADS)
    padded = partials.new_zeros(rows * _REDUCE_THREADS)
    padded[: partials.numel()] = partials
    total = partials.new_zeros(_REDUCE_THREADS)
    for row in padded.view(rows, _REDUCE_THREADS):
        total = total + row
    out.copy_(_block_sum(total[None]))


def _block_sum(x: Tensor) -> Tensor:
    """Add ``[c, threads]`` to ``[c]``: within warps of 32 lanes first, then across warps."""
    warps = _fold(x.view(-1, _LANES)).view(x.shape[0], -1)
    return _fold(warps)


def _fold(x: Tensor) -> Tensor:
    """Add ``[r, power of two]`` to ``[r]`` by halves."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]
