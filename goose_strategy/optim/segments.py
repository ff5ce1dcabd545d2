"""The flat tensors that torch's optimizer steps: runs of parameters with one common state.

In ordinary training the whole own slice of a bucket is one segment. A slice is cut where the
parameters' histories differ: one without a gradient is left alone by torch (no decay, no momentum,
no step count), so it cannot share a tensor with one that has a gradient.

    own slice   |  a  |    b    | c |  d  |        b was not used by any rank in this step
    segments    |  0  |    1    |    2    |        0 and 2 are stepped, 1 is not
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.grads.buffer import GradSlot

State = dict[str, Any]

SCALARS = frozenset({"step", "mu_product", "eta", "mu", "clock"})
"""Keys under which elementwise optimizers keep one number per parameter."""


class Piece:
    """The part of one parameter that lies in this rank's slice.

    Attributes:
        slot: The parameter.
        start: First element, counted in the slice.
        stop: One past its last element.
    """

    __slots__ = ("slot", "start", "stop")

    def __init__(self, slot: GradSlot, start: int, stop: int) -> None:
        self.slot = slot
        self.start = start
        self.stop = stop

    def within_param(self, bucket: Bucket) -> tuple[int, int]:
        """Return the range in the flattened (tp-local) parameter."""
        first = self.first_of(bucket)
        return first, first + self.stop - self.start

    def first_of(self, bucket: Bucket) -> int:
        """Return the element of the flattened (tp-local) parameter at which the piece begins."""
        return self.start + bucket.grads.start - self.slot.start


class Segment:
    """A run of pieces that share one optimizer state.

    Attributes:
        pieces: The pieces, adjacent in the slice.
        start: First element, counted in the slice.
        stop: One past the last element; the padding behind the last piece is included.
        weight: The main weights of the run as torch's optimizer sees them.
        grad: Their gradient.
    """

    __slots__ = ("grad", "pieces", "start", "stop", "weight")

    def __init__(self, pieces: list[Piece], stop: int, *, main: Tensor, grad: Tensor) -> None:
        self.pieces = pieces
        self.start = pieces[0].start
        self.stop = stop
        self.weight = nn.Parameter(main[self.start : stop])
        self.grad = grad[self.start : stop]


class Shard:
    """This rank's slice of one bucket: main weights and segments.

    Attributes:
        bucket: The bucket.
        main: ``[n]`` in the accumulator's dtype: the slice of the weights itself, or an fp32 copy
            of it if the weights are of lower precision.
        pieces: Parts of parameters in the slice, in order.
        segments: Runs of pieces, in order.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        own = bucket.own_weights
        self.separate = own.dtype != bucket.key.main_dtype
        self.main = own.to(bucket.key.main_dtype) if self.separate else own
        self.pieces = pieces_of(bucket)
        self.segments: list[Segment] = []
        if self.pieces:
            self.segments.append(self._segment(self.pieces))

    def _segment(self, pieces: list[Piece]) -> Segment:
        last = self.pieces.index(pieces[-1]) + 1
        stop = self.pieces[last].start if last < len(self.pieces) else self.main.numel()
        return Segment(pieces, stop, main=self.main, grad=self.bucket.grads.own)

    def active(self, states: dict[Tensor, State]) -> list[Segment]:
        """Return the segments to step, cut so that all their parameters have a gradient.

        Args:
            states: State by segment weight; follows the cuts.
        """
        present = [slot.param.grad is not None for slot in self.bucket.slots]
        if all(present):
            return self.segments
        if not any(present):
            return []
        cut: list[Segment] = []
        for segment in self.segments:
            runs = _runs(segment.pieces, [p.slot.param.grad is not None for p in segment.pieces])
            cut += [segment] if len(runs) == 1 else self._split(segment, runs, states)
        self.segments = cut
        return [s for s in self.segments if s.pieces[0].slot.param.grad is not None]

    def _split(
        self, segment: Segment, runs: list[list[Piece]], states: dict[Tensor, State]
    ) -> list[Segment]:
        parts = [self._segment(run) for run in runs]
        state = states.pop(segment.weight, None)
        if state is not None:
            for part in parts:
                start, stop = part.start - segment.start, part.stop - segment.start
                states[part.weight] = {
                    key: _part(value, start, stop) for key, value in state.items()
                }
        return parts

    def states_by_piece(self, states: Mapping[Tensor, State]) -> Iterable[tuple[Piece, State]]:
        """Yield each piece that has a state, with flat tensors of the piece's own length."""
        for segment in self.segments:
            state = states.get(segment.weight)
            if state:
                for piece in segment.pieces:
                    start, stop = piece.start - segment.start, piece.stop - segment.start
                    yield piece, {k: _part(value, start, stop) for k, value in state.items()}

    def install(self, found: Mapping[str, State], states: dict[Tensor, State]) -> None:
        """Replace the states of all parameters in the slice.

        Args:
            found: State by parameter name, flat tensors of the piece's length and scalars; a
                parameter that is missing has no state.
            states: State by segment weight; this shard's entries are replaced.
        """
        for segment in self.segments:
            states.pop(segment.weight, None)
        marks = [_signature(found.get(piece.slot.name)) for piece in self.pieces]
        self.segments = [self._segment(run) for run in _runs(self.pieces, marks)]
        for segment in self.segments:
            first = found.get(segment.pieces[0].slot.name)
            if first:
                states[segment.weight] = {
                    key: self._joined(segment, key, found) if _is_flat(value) else _own(value)
                    for key, value in first.items()
                }

    def _joined(self, segment: Segment, key: str, found: Mapping[str, State]) -> Tensor:
        whole = torch.zeros_like(segment.weight, requires_grad=False)
        for piece in segment.pieces:
            place = whole[piece.start - segment.start : piece.stop - segment.start]
            place.copy_(found[piece.slot.name][key].view(-1))
        return whole

    def _written(self) -> Tensor:
        """Return where the weights are not the rounded main weights; NaN is no difference."""
        return written_over(self.bucket.own_weights, self.main)

    @property
    def checks_weights(self) -> bool:
        """Whether weights written from outside have to be looked for."""
        return self.separate

    def main_values(self) -> Tensor:
        """Return the main weights ``[n]``; not to be written to."""
        return self.main

    def differs(self) -> Tensor:
        """Return whether the weights were written since they were published, a bool scalar."""
        return self._written().any()

    def rebuild_main(self) -> None:
        """Take over the weights wherever they were written; the low bits of others stay."""
        own = self.bucket.own_weights
        self.main.copy_(torch.where(self._written(), own.to(self.main.dtype), self.main))

    def set_main(self, values: Tensor) -> None:
        """Set the main weights ``[n]``; the weights stay."""
        self.main.copy_(values)

    def publish(self) -> None:
        """Round the main weights into this rank's slice of the weights."""
        if self.separate:
            self.bucket.own_weights.copy_(self.main)


def pieces_of(bucket: Bucket) -> list[Piece]:
    """Return the parts of parameters that lie in this rank's slice of a bucket, in order."""
    begin, end = bucket.grads.start, bucket.grads.stop
    return [
        Piece(slot, max(slot.start, begin) - begin, min(slot.stop, end) - begin)
        for slot in bucket.slots
        if slot.start < end and slot.stop > begin
    ]


def written_over(weights: Tensor, main: Tensor) -> Tensor:
    """Return where weights are not the rounded main weights; NaN is no difference."""
    return (main.to(weights.dtype) != weights) & (weights == weights)


def is_rounded(weights: Tensor, main: Tensor) -> Tensor:
    """Return where weights are main weights, rounded to nearest with ties to either side."""
    rounded = main.to(weights.dtype) == weights
    if weights.dtype == torch.bfloat16:
        away = ((main.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
        rounded |= away == weights
    return rounded


def _runs(pieces: Sequence[Piece], marks: Sequence[object]) -> list[list[Piece]]:
    """Group adjacent pieces with equal marks."""
    runs: list[list[Piece]] = []
    previous: object = object()
    for piece, mark in zip(pieces, marks, strict=True):
        if runs and mark == previous:
            runs[-1].append(piece)
        else:
            runs.append([piece])
        previous = mark
    return runs


def _is_flat(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _part(value: Any, start: int, stop: int) -> Any:
    """Return the state of a part: a view of a flat tensor, a copy of a scalar."""
    return value[start:stop] if _is_flat(value) else _own(value)


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _signature(state: State | None) -> object:
    """Return what has to be equal for two parameters to share a segment."""
    if not state:
        return None
    return tuple(
        (key, None if _is_flat(value) else float(value) if isinstance(value, Tensor) else value)
        for key, value in sorted(state.items())
    )
