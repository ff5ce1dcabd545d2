"""Philox4x32-7 in torch's integer arithmetic: random bits that depend on a key and a position only.

torch's generators have a state that every draw advances, so what an element receives depends on how
the tensors around it are cut. A counter-based generator has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
"""The fewest that pass BigCrush (Salmon et al. 2011); rounding needs no margin beyond that."""

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(key: Tensor, counter: Tensor, *, stream: int, step: Tensor) -> Tensor:
    """Return four random words per counter.

    Args:
        key: ``[k]`` int64, the bits of an unsigned 64-bit key.
        counter: ``[k]`` int64.
        stream: Distinguishes independent draws at the same counter.
        step: ``[]`` int64; its lower 32 bits count.

    Returns:
        ``[k, 4]`` int64, each in ``[0, 2**32)``.
    """
    k0, k1 = key & _MASK, (key >> 32) & _MASK
    c0, c1 = counter & _MASK, (counter >> 32) & _MASK
    c2, c3 = torch.full_like(c0, stream), (step & _MASK).expand_as(c0)
    for _ in range(ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1)


def random_halves(key: Tensor, counter: Tensor, *, stream: int, step: Tensor) -> Tensor:
    """Return eight 16-bit random numbers per counter, the lower half of each word first.

    Args:
        key: ``[k]`` int64.
        counter: ``[k]`` int64: element / 8.
        stream: 0 for main weights, 1 for second moments.
        step: ``[]`` int64.

    Returns:
        ``[k, 8]`` int32 in ``[0, 65536)``.
    """
    words = philox(key, counter, stream=stream, step=step)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=2)
    return halves.view(-1, 8).to(torch.int32)
