"""What one rank contributes to a checkpoint, or wants from one: named tensors as boxes.

``torch.distributed.checkpoint`` plans for tensors, ``ShardedTensor`` and ``DTensor``. None of them
can say "elements 1000 to 5000 of the flattened left half of this matrix", which is what a ZeRO-1
rank owns. Its storage format can: a checkpoint is a list of boxes per key. ``LocalTensor`` is a
tensor as such boxes, in the coordinates of the whole tensor, so that what was saved under one
layout is found again under any other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from goose_strategy.errors import CheckpointError
from goose_strategy.mesh.shard import Box

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EntryPath = tuple[str | int, ...]
"""Where a value lies in the nested checkpoint, e.g. ``("model", "lm_head.weight")``."""


def key_of(path: EntryPath) -> str:
    """Return the flat key of ``path``, by the same rule as DCP's nested state dicts."""
    return ".".join(str(part) for part in path)


@dataclass(frozen=True)
class LocalTensor:
    """The part of one tensor of the checkpoint that this rank holds.

    Args:
        path: Where the tensor lies in the checkpoint; the first part is the user's name for the
            object it belongs to (``"model"``).
        global_shape: Shape of the whole tensor.
        dtype: Type of the elements.
        pieces: Boxes in the coordinates of the whole tensor, each with the tensor (a view) that
            holds its elements and has the shape of the box. Saving reads them, loading writes them.
        writer: Whether this rank writes its pieces. Of the ranks that hold the same box, exactly
            one does. Loading takes no notice of it.
        aliases: Further paths under which the same values are to be found (tied weights). They
            cost no storage.
        shared: Other ranks may be writers of the same boxes too, with the same values (a buffer
            that several stages hold); the lowest rank's are written.

    Raises:
        CheckpointError: If a piece lies outside the tensor or does not have the shape of its box.
    """

    path: EntryPath
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[Box, Tensor], ...]
    writer: bool = True
    aliases: tuple[EntryPath, ...] = ()
    shared: bool = False

    def __post_init__(self) -> None:
        for box, tensor in self.pieces:
            if not contains(self.global_shape, box):
                raise CheckpointError(
                    f"{self.key}: offsets={box.offsets} with lengths={box.lengths} lies outside "
                    f"global_shape={self.global_shape}."
                )
            if tuple(tensor.shape) != tuple(box.lengths):
                raise CheckpointError(
                    f"{self.key}: a piece of shape={tuple(tensor.shape)} cannot hold a box of "
                    f"lengths={box.lengths}."
                )

    @classmethod
    def whole(cls, path: EntryPath, tensor: Tensor, *, writer: bool = True) -> LocalTensor:
        """Describe a tensor of which this rank holds everything."""
        shape = tuple(tensor.shape)
        box = Box((0,) * len(shape), shape)
        return cls(path, shape, tensor.dtype, ((box, tensor),), writer)

    @property
    def key(self) -> str:
        """The flat key in the checkpoint."""
        return key_of(self.path)

    @property
    def entry(self) -> str:
        """The user's name for the object that the tensor belongs to."""
        return str(self.path[0])


def contains(shape: tuple[int, ...], box: Box) -> bool:
    """Return whether ``box`` lies within a tensor of ``shape``."""
    if not len(shape) == len(box.offsets) == len(box.lengths):
        return False
    blocks = zip(shape, box.offsets, box.lengths, strict=True)
    return all(at >= 0 and length >= 0 and at + length <= whole for whole, at, length in blocks)


def overlap(one: Box, other: Box) -> Box | None:
    """Return the block that two boxes share, or ``None`` if they share no element."""
    starts = [max(a, b) for a, b in zip(one.offsets, other.offsets, strict=True)]
    ends = [
        min(a + m, b + n)
        for a, m, b, n in zip(one.offsets, one.lengths, other.offsets, other.lengths, strict=True)
    ]
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return Box(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))


def check_tiling(key: str, shape: tuple[int, ...], boxes: Iterable[Box]) -> None:
    """Check that ``boxes`` cover a tensor of ``shape`` exactly once.

    Raises:
        CheckpointError: If an element is held by no box, or by two.
    """
    listed = sorted(box for box in boxes if box.numel)
    active: list[Box] = []
    for box in listed:
        # Sorted by the first offset: a box whose rows ended before this one begins is done with.
        active = [
            seen
            for seen in active
            if not shape or seen.offsets[0] + seen.lengths[0] > box.offsets[0]
        ]
        for seen in active:
            if overlap(seen, box) is not None:
                raise CheckpointError(
                    f"{key}: two ranks hold the same elements, once at offsets={seen.offsets} with "
                    f"lengths={seen.lengths} and once at offsets={box.offsets} with "
                    f"lengths={box.lengths}; exactly one of them may be a writer."
                )
        active.append(box)
    covered = sum(box.numel for box in listed)
    if covered != math.prod(shape):
        raise CheckpointError(
            f"{key}: the ranks hold {covered} of the {math.prod(shape)} elements of "
            f"global_shape={shape}; every element needs one writer."
        )


def nested(flat: Mapping[EntryPath, Any]) -> dict[str, Any]:
    """Build nested containers from paths; an ``int`` part is an index of a list.

    Args:
        flat: Value per path.

    Returns:
        Dicts (for ``str`` parts) and lists (for ``int`` parts) with the values as leaves.
    """
    root: dict[str, Any] = {}
    for path, value in flat.items():
        holder: Any = root
        for part, after in itertools.pairwise(path):
            holder = _child(holder, part, [] if isinstance(after, int) else {})
        _child(holder, path[-1], None)
        holder[path[-1]] = value
    return root


def flattened(prefix: EntryPath, value: Any) -> dict[EntryPath, Any]:
    """Take nested dicts and lists of dicts apart, by the same rule as DCP; inverse of `nested`.

    Args:
        prefix: Path of ``value``.
        value: Dicts are always taken apart, lists only where a dict lies within.

    Returns:
        Leaf per path.
    """
    if isinstance(value, Mapping):
        parts: list[tuple[str | int, Any]] = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list) and any(_has_mapping(item) for item in value):
        parts = list(enumerate(value))
    else:
        return {prefix: value}
    leaves: dict[EntryPath, Any] = {}
    for part, item in parts:
        leaves.update(flattened((*prefix, part), item))
    return leaves


def _has_mapping(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and any(_has_mapping(item) for item in value)
    )


def _child(holder: Any, part: str | int, fresh: Any) -> Any:
    """Return ``holder[part]``, made to be ``fresh`` where there is none."""
    if isinstance(part, int):
        holder.extend([None] * (part + 1 - len(holder)))
        if holder[part] is None:
            holder[part] = fresh
        return holder[part]
    return holder.setdefault(part, fresh)
