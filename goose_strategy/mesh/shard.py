"""Which part of which named tensor this rank holds.

``ShardSpec`` is the one currency of the loader, the gradient buckets, the optimizer and the
checkpoint. ``DTensor`` placements say the same for even cuts along one dimension; they know neither
a replicated tensor with partial gradients nor the copy of a tied weight, and they cannot name a
flat range of a matrix, which is what a ZeRO-1 rank owns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from goose_strategy.errors import MeshError


class Box(NamedTuple):
    """An axis-aligned block of a tensor, in elements."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements in the block."""
        return math.prod(self.lengths)


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """The block of one named parameter that this tp rank holds, before dp cuts it further.

    Args:
        name: Name in the model, without any prefix of the strategy.
        global_shape: Shape of the whole tensor.
        offsets: Where the local block starts in the whole tensor.
        local_shape: Shape of the local block.
        dtype: Type of the elements.
        tp_dim: Dimension that is cut over tp; ``None`` if each tp rank holds all of it.
        runs: Where this rank's slices of ``tp_dim`` lie, as ``(start, length)`` in their local
            order, if there are several: a fused query, key and value weight is cut in each of its
            three parts. Empty for a single block; otherwise ``offsets`` is that of the first run.
        tp_partial: Each tp rank holds all of it but sees only its share of the gradient, which
            therefore has to be summed over tp.
        tie: Name of the tied weight that this tensor is a copy of, where the weight lives on
            another stage too.
        tie_owner: ``False`` on the copy that is neither counted in norms nor saved.

    Raises:
        MeshError: If the block lies outside the tensor or the roles contradict each other.
    """

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    tp_dim: int | None = None
    runs: tuple[tuple[int, int], ...] = ()
    tp_partial: bool = False
    tie: str | None = None
    tie_owner: bool = True

    def __post_init__(self) -> None:
        if not len(self.global_shape) == len(self.offsets) == len(self.local_shape):
            raise MeshError(
                f"name={self.name!r}: global_shape={self.global_shape}, offsets={self.offsets} "
                f"and local_shape={self.local_shape} must have one entry per dimension."
            )
        self._check_tp_dim()
        if any(
            at < 0 or length < 0 or at + length > whole
            for box in self.boxes
            for whole, at, length in zip(self.global_shape, *box, strict=True)
        ):
            raise MeshError(
                f"name={self.name!r}: the block at offsets={self.offsets} of "
                f"local_shape={self.local_shape} lies outside global_shape={self.global_shape}."
            )
        if self.tp_partial and self.tp_dim is not None:
            raise MeshError(
                f"name={self.name!r}: tp_partial=True is for replicated tensors, but "
                f"tp_dim={self.tp_dim} cuts this one."
            )
        if self.tie is None and not self.tie_owner:
            raise MeshError(f"name={self.name!r}: tie_owner=False needs tie to name the weight.")

    def _check_tp_dim(self) -> None:
        if self.tp_dim is not None and not 0 <= self.tp_dim < len(self.global_shape):
            raise MeshError(
                f"name={self.name!r}: tp_dim={self.tp_dim} is no dimension of "
                f"global_shape={self.global_shape}."
            )
        if not self.runs:
            return
        dim = -1 if self.tp_dim is None else self.tp_dim
        total = sum(length for _, length in self.runs)
        if dim < 0 or total != self.local_shape[dim] or self.runs[0][0] != self.offsets[dim]:
            raise MeshError(
                f"name={self.name!r}: runs={self.runs} must lie along tp_dim={self.tp_dim}, begin "
                f"at offsets={self.offsets} and make up local_shape={self.local_shape}."
            )

    @classmethod
    def replicated(cls, name: str, tensor: Tensor, *, tp_partial: bool = False) -> ShardSpec:
        """Describe a tensor of which each tp rank holds all."""
        shape = tuple(tensor.shape)
        return cls(
            name=name,
            global_shape=shape,
            offsets=(0,) * len(shape),
            local_shape=shape,
            dtype=tensor.dtype,
            tp_partial=tp_partial,
        )

    @property
    def numel(self) -> int:
        """Number of local elements."""
        return math.prod(self.local_shape)

    @property
    def is_sharded(self) -> bool:
        """Whether tp cuts this tensor."""
        return self.tp_dim is not None

    @property
    def boxes(self) -> list[Box]:
        """The local blocks in global coordinates, in their local order along ``tp_dim``."""
        return [box for box, _ in self._places(Box((0,) * len(self.local_shape), self.local_shape))]

    def pieces(self, local: Tensor) -> list[tuple[Box, Tensor]]:
        """Cut the local tensor, or one of its shape, into its blocks.

        Args:
            local: Of ``local_shape``.

        Returns:
            Box in global coordinates and view of the elements, for each block.
        """
        whole = Box((0,) * len(self.local_shape), self.local_shape)
        return [(box, self._view(local, part)) for box, part in self._places(whole)]

    def flat_range_pieces(self, flat: Tensor, start: int, stop: int) -> list[tuple[Box, Tensor]]:
        """Cut a range of the flattened local tensor into boxes of the whole tensor.

        Args:
            flat: The range's elements, ``[stop - start]``.
            start: First local element (row-major).
            stop: One past the last local element.

        Returns:
            Box in global coordinates and view of its elements; a range of an n-dimensional tensor
            has at most ``2 * n - 1`` boxes for each run. An empty range has none.

        Raises:
            MeshError: If the range is not within the local tensor.
        """
        if not 0 <= start <= stop <= self.numel:
            raise MeshError(
                f"name={self.name!r}: range start={start}, stop={stop} is not within the "
                f"{self.numel} local elements."
            )
        found: list[tuple[Box, Tensor]] = []
        at = 0
        for block in map(Box._make, _row_major_boxes(self.local_shape, start, stop)):
            view = flat[at : at + block.numel].view(block.lengths)
            at += block.numel
            found += [(box, self._view(view, part)) for box, part in self._places(block)]
        return found

    def _places(self, block: Box) -> list[tuple[Box, tuple[int, int]]]:
        """Say where a block of the local tensor lies in the whole.

        Returns:
            For each run that the block meets, its box in global coordinates, and the part of the
            block, as start and length along ``tp_dim``.
        """
        if not self.runs or self.tp_dim is None:
            offsets = tuple(a + b for a, b in zip(self.offsets, block.offsets, strict=True))
            length = 0 if self.tp_dim is None else block.lengths[self.tp_dim]
            return [(Box(offsets, block.lengths), (0, length))]
        dim, found, local = self.tp_dim, [], 0
        first, last = block.offsets[dim], block.offsets[dim] + block.lengths[dim]
        for start, length in self.runs:
            low, high = max(first, local), min(last, local + length)
            if low < high:
                box = Box(
                    _changed(block.offsets, dim, start + low - local),
                    _changed(block.lengths, dim, high - low),
                )
                found.append((box, (low - first, high - low)))
            local += length
        return found

    def _view(self, block: Tensor, part: tuple[int, int]) -> Tensor:
        return block if self.tp_dim is None else block.narrow(self.tp_dim, *part)


def _changed(numbers: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*numbers[:index], value, *numbers[index + 1 :])


def _row_major_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cut ``[start, stop)`` of a row-major tensor of ``shape`` into boxes."""
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return _prefixed(first, _row_major_boxes(shape[1:], head, tail))
    boxes: list[Box] = []
    if head:
        boxes += _prefixed(first, _row_major_boxes(shape[1:], head, inner))
        first += 1
    if first < last:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if tail:
        boxes += _prefixed(last, _row_major_boxes(shape[1:], 0, tail))
    return boxes


def _prefixed(index: int, boxes: list[Box]) -> list[Box]:
    """Put boxes of one row into the tensor that holds the row at ``index``."""
    return [Box((index, *box.offsets), (1, *box.lengths)) for box in boxes]
