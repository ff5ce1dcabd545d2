"""Cutting one dimension of a tensor over the tensor-parallel ranks.

``torch.chunk`` gives nine rows to four ranks as 3, 3, 3, 0. A vocabulary that tp does not divide
is cut evenly here, 3, 2, 2, 2, so that no rank waits for another one's larger slice; nothing is
padded, and the loss, the gather and the checkpoint read the sizes from here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from goose_strategy.errors import PlanError
from goose_strategy.mesh.shard import ShardSpec


def balanced_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Cut ``total`` into ``parts`` sizes that differ by at most one, the larger ones first."""
    size, rest = divmod(total, parts)
    return tuple(size + (part < rest) for part in range(parts))


@dataclass(frozen=True)
class Cut:
    """One dimension cut into balanced slices, of which this rank holds one.

    A dimension that is several matrices side by side (a fused query, key and value) is cut in each
    of them:

        whole   q q q q k k v v        parts=2: rank 0 holds  q q k v
                                                rank 1 holds      q q k v

    Args:
        dim: The dimension.
        total: Its length in the whole tensor.
        parts: Number of slices.
        index: Which slice this rank holds.
        packed: Lengths of the matrices side by side, or their ratios; empty for one.

    Raises:
        PlanError: If a slice would be empty, or the matrices do not make up the dimension.
    """

    dim: int
    total: int
    parts: int = 1
    index: int = 0
    packed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.total < self.parts:
            raise PlanError(
                f"tp={self.parts} is larger than the dimension to cut, {self.total}; "
                f"choose tp <= {self.total}.",
                axis="tp",
            )
        if self.packed and self.total % sum(self.packed):
            raise PlanError(
                f"a dimension of {self.total} does not hold matrices in the ratio {self.packed}; "
                f"the plan does not fit this model.",
                axis="tp",
            )
        if any(length % self.parts for length in self.lengths if self.packed):
            raise PlanError(
                f"tp={self.parts} does not divide the matrices side by side, {self.lengths}; "
                f"choose a divisor of {math.gcd(*self.lengths)}.",
                axis="tp",
            )

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Length of each of the matrices side by side."""
        unit = self.total // sum(self.packed or (self.total,))
        return tuple(unit * ratio for ratio in self.packed) or (self.total,)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Length of every rank's slice, in all matrices together."""
        if len(self.lengths) > 1:
            return (self.total // self.parts,) * self.parts
        return balanced_sizes(self.total, self.parts)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Start and length of this rank's slice of each matrix."""
        if len(self.lengths) == 1:
            return ((sum(self.sizes[: self.index]), self.length),)
        ends = itertools.accumulate(self.lengths)
        own = [length // self.parts for length in self.lengths]
        return tuple(
            (end - length + self.index * part, part)
            for end, length, part in zip(ends, self.lengths, own, strict=True)
        )

    @property
    def start(self) -> int:
        """Where this rank's (first) slice starts."""
        return self.runs[0][0]

    @property
    def length(self) -> int:
        """Length of this rank's slice."""
        return self.sizes[self.index]

    @property
    def stop(self) -> int:
        """One past the end of this rank's slice."""
        return self.start + self.length

    def take(self, whole: Tensor) -> Tensor:
        """Copy this rank's slice out of ``whole``, so that the rest can be freed."""
        slices = [whole.narrow(self.dim, start, length) for start, length in self.runs]
        if len(slices) > 1:
            return torch.cat(slices, self.dim)
        return slices[0].clone(memory_format=torch.contiguous_format)

    def join(self, slices: Tensor) -> Tensor:
        """Put the whole together from the slices of all ranks, one behind the other.

        Args:
            slices: ``total`` long along ``dim``, in rank order.

        Returns:
            The whole tensor.
        """
        if len(self.lengths) == 1:
            return slices
        own = [length // self.parts for length in self.lengths]
        # [rank][matrix] becomes [matrix][rank].
        pieces = slices.split(own * self.parts, self.dim)
        return torch.cat(
            [piece for m in range(len(own)) for piece in pieces[m :: len(own)]], self.dim
        )

    def spec(self, name: str, param: Tensor) -> ShardSpec:
        """Describe ``param``, a slice that was taken by this cut, under ``name``."""
        local = tuple(param.shape)
        whole, offsets = list(local), [0] * len(local)
        whole[self.dim], offsets[self.dim] = self.total, self.start
        return ShardSpec(
            name=name,
            global_shape=tuple(whole),
            offsets=tuple(offsets),
            local_shape=local,
            dtype=param.dtype,
            tp_dim=self.dim,
            runs=self.runs if len(self.runs) > 1 else (),
        )


def replace_data(param: Tensor, data: Tensor) -> None:
    """Give ``param`` other data, of any shape, and no gradient.

    If the output of an earlier forward is still alive, so is the node that accumulates this
    parameter's gradient, with the old shape in it. torch forgets the node when the type changes.
    """
    other = torch.float16 if data.dtype != torch.float16 else torch.float32
    param.grad = None
    param.data = data.new_empty(0, dtype=other)
    param.data = data


class Slicer:
    """Cuts parameters in place and remembers how, so that a tied weight is cut once.

    The `torch.nn.Parameter` stays the same object with less data: optimizers, tied modules and
    users that hold it see the slice.
    """

    def __init__(self, *, parts: int, index: int) -> None:
        self.parts = parts
        self.index = index
        self._cuts: dict[Tensor, Cut] = {}

    def cut(self, param: Tensor, dim: int, *, packed: tuple[int, ...] = ()) -> Cut:
        """Cut ``param`` along ``dim``, unless it was cut that way already.

        Args:
            param: Cut in place.
            dim: Along which dimension.
            packed: See `Cut`.

        Raises:
            PlanError: If it was cut along another dimension, or is too small.
        """
        known = self._cuts.get(param)
        if known is not None:
            if known.dim != dim:
                raise PlanError(
                    f"a weight shared by two modules would be cut along dim={known.dim} and "
                    f"dim={dim}; untie it, or give both modules a style that cuts the same one.",
                    axis="tp",
                )
            return known
        cut = Cut(dim, param.shape[dim], self.parts, self.index, packed)
        replace_data(param, cut.take(param.data))
        self._cuts[param] = cut
        return cut

    def get(self, param: Tensor) -> Cut | None:
        """Return how ``param`` was cut, if it was."""
        return self._cuts.get(param)

    def items(self) -> list[tuple[Tensor, Cut]]:
        """Return every parameter that was cut, with its cut."""
        return list(self._cuts.items())
