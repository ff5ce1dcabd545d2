"""The arithmetic of norms per sample: products of tokens, lookups, and rows times factors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from goose_strategy.compat.torch import version_of

MOST = 2**24
"""Elements of an intermediate result; samples are taken one by one where it would be larger."""

SLACK = 4
"""Last bits, of the sum of what products of tokens are in size, by which a square is rounded up.

Tokens whose gradients cancel leave a small sum of large products, and their rounding may hide a
part of it: a sample could be clipped too little. What does not cancel grows by a 3e-7th in fp32.
"""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which squares are summed: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class Products:
    """How the norms of products are computed, and the last one's tokens.

    Several layers that read one input (query, key and value, say) follow one another, so their
    products of its tokens are kept once.

    Attributes:
        norm: See `PrivacyConfig`.
    """

    norm: Literal["mixed", "ghost", "instantiate"] = "mixed"
    _kept: list[tuple[Tensor, int, Tensor]] = field(default_factory=list)

    def ghost(self, tokens: int, width: int, out: int) -> bool:
        """Tell whether products of tokens take less than the gradients themselves."""
        if self.norm == "mixed":
            return tokens * (width + out) < width * out
        return self.norm == "ghost"

    def gram(self, x: Tensor) -> Tensor:
        """Return ``x @ x.mT`` in at least fp32, ``[rows, tokens, tokens]``."""
        for known, version, product in self._kept:
            if _same(known, x) and version == version_of(x):
                return product
        wider = x.to(wide(x.dtype))
        product = wider @ wider.mT
        self._kept = [(x, version_of(x), product)]
        return product

    def forget(self) -> None:
        """Free what was kept."""
        self._kept = []


def _same(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are the same elements of one memory (both are alive)."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype is other.dtype
    )


def product_squares(x: Tensor, grad: Tensor, how: Products) -> Tensor:
    """Return the squared norms of ``grad[i].mT @ x[i]``.

    Args:
        x: ``[rows, tokens, in]``.
        grad: ``[rows, tokens, out]``.
        how: The way.

    Returns:
        ``[rows]``, in at least fp32; not negative, and never rounded down.
    """
    rows, tokens, width = x.shape
    out = grad.shape[2]
    if how.ghost(tokens, width, out):
        if rows * tokens * tokens > MOST and rows > 1:
            parts = zip(x.split(1), grad.split(1), strict=True)
            return torch.cat([product_squares(a, b, how) for a, b in parts])
        wider = grad.to(wide(grad.dtype))
        products = how.gram(x) * (wider @ wider.mT)
        slack = SLACK * torch.finfo(products.dtype).eps * products.abs().sum((1, 2))
        # Rounding may leave a tiny negative number where the gradient is nearly zero.
        return products.sum((1, 2)).clamp(min=0) + slack
    squares = []
    for a, b in zip(x.to(wide(x.dtype)), grad.to(wide(grad.dtype)), strict=True):
        squares.append((b.t() @ a).square_().sum())
    return torch.stack(squares)


def embedding_squares(ids: Tensor, grad: Tensor, most: int) -> Tensor:
    """Return the squared norms of each sample's gradient of an embedding.

    Args:
        ids: ``[rows, tokens]``, in ``[0, most)``.
        grad: ``[rows, tokens, width]``.
        most: Number of ids.

    Returns:
        ``[rows]``, in at least fp32.
    """
    rows, tokens = ids.shape
    samples = torch.arange(rows, device=ids.device).repeat_interleave(tokens)
    keys, order = (ids.reshape(-1).long() + samples * most).sort()
    # Equal ids of a sample lie side by side now; their gradients are one row of the weight's. There
    # are at most as many as tokens, so that nobody has to wait for their number.
    starts = torch.ones_like(keys)
    starts[1:] = (keys[1:] != keys[:-1]).long()
    groups = starts.cumsum(0) - 1
    flat = grad.reshape(rows * tokens, -1)[order]
    sums = torch.zeros_like(flat, dtype=wide(flat.dtype))
    sums.index_add_(0, groups, flat.to(sums.dtype))
    owner = torch.zeros_like(groups).scatter_(0, groups, samples[order])
    return sums.new_zeros(rows).index_add_(0, owner, sums.square().sum(1))


def tied_rows(x: Tensor, grad: Tensor, ids: Tensor) -> Tensor:
    """Return the rows of a head's weight gradient that an embedding looks up.

    Args:
        x: Input of the head, ``[rows, tokens, width]``.
        grad: Gradient of its output, ``[rows, tokens, vocabulary]``.
        ids: ``[rows, looked up]``, in the vocabulary.

    Returns:
        ``[rows, looked up, width]``: row ``ids[i, t]`` of sample ``i``'s gradient, in at least
        fp32.
    """
    index = ids.long().unsqueeze(1).expand(-1, grad.shape[1], -1)
    chosen = grad.gather(2, index).to(wide(grad.dtype))
    return chosen.mT @ x.to(chosen.dtype)


def scaled_rows(tensor: Tensor, factors: Tensor, good: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return each sample times its factor; zeros for samples that are not finite.

    Args:
        tensor: ``[rows, tokens, width]``.
        factors: ``[rows]``.
        good: ``[rows]``, or ``None`` if all samples are finite.
        dtype: Of the result.
    """
    scaled = (tensor * factors.view(-1, 1, 1)).to(dtype)
    return without_bad_rows(scaled, good)


def factor_dtype(tensor: Tensor) -> torch.dtype:
    """Return the type in which tokens are multiplied to a clipped gradient.

    16 bits are widened on the CPU, which multiplies no faster by them. Devices do, many times:
    there the scaled tokens are rounded once, for which the clipping leaves room, and only their
    products are wide.
    """
    return wide(tensor.dtype) if tensor.device.type == "cpu" else tensor.dtype


def without_bad_rows(tensor: Tensor, good: Tensor | None) -> Tensor:
    """Return ``[rows, tokens, width]`` with zeros in the place of samples that are not finite.

    Zero times infinity is no number, so a factor of zero is not enough.
    """
    if good is None:
        return tensor
    return torch.where(good.view(-1, 1, 1), tensor, torch.zeros_like(tensor))
