"""A device that the CPU stands in for, whose copies happen as late, or as early, as they may.

A card overlaps copies with computations, so a wait that is missing shows as a stale number, now and
then. Here it shows every time: each stream is a row of work that is done either only when somebody
waits for it (``late``), or as soon as nothing is waited for any more (``early``). Between them, no
order that the events allow and the program does not survive goes unseen. A copy whose tensor is
gone by then is an error, as it would be other data on a card.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from goose_strategy.mesh import mesh as mesh_module
from goose_strategy.mesh.lane import PinnedPool

Pace = Literal["late", "early", "now"]
POISON = 0xFF
"""Bytes of pinned memory that nothing was copied to: NaN in every floating point type."""


@dataclass(frozen=True)
class Point:
    """A point in the work of a stream: an event."""

    row: Row
    at: int

    def synchronize(self) -> None:
        """Let the host wait until the stream has come here."""
        self.row.reach(self.at)

    def query(self) -> bool:
        """Whether the stream has come here."""
        return self.row.done >= self.at


class Row:
    """A stream: work in order, done when its pace says so.

    Args:
        pace: ``late``: when somebody waits for it; ``early``: when it waits for nothing; ``now``:
            when it is given, and what it waits for with it.
        rows: All streams of the device; this one is added.

    Attributes:
        done: How many pieces of work are done.
        given: How many there were.
    """

    def __init__(self, pace: Pace, rows: list[Row]) -> None:
        self._pace = pace
        self._rows = rows
        self._work: deque[Callable[[], object] | Point] = deque()
        self.done = 0
        self.given = 0
        rows.append(self)

    def give(self, work: Callable[[], object] | Point) -> None:
        """Add something to do, or to wait for."""
        self._work.append(work)
        self.given += 1
        if self._pace == "now":
            self.reach(self.given)
        self._hurry()

    def wait_event(self, event: Point) -> None:
        """Let what is given from now on wait for ``event``."""
        self.give(event)

    def reach(self, at: int) -> None:
        """Do all work up to ``at``, and on other streams what it waits for."""
        while self.done < at:
            first = self._work[0]
            if isinstance(first, Point) and not first.query():
                first.synchronize()  # which may have done this stream's work, too
                continue
            self._step()
            self._hurry()

    def _step(self) -> None:
        work = self._work.popleft()
        self.done += 1
        if not isinstance(work, Point):
            work()

    def _hurry(self) -> None:
        """Do what early streams can do by now."""
        early = [row for row in self._rows if row._pace == "early"]
        while ready := [row for row in early if row._can_go_on()]:
            ready[0]._step()

    def _can_go_on(self) -> bool:
        if not self._work:
            return False
        first = self._work[0]
        return not isinstance(first, Point) or first.query()


class FakeLane:
    """The seam between device and host (``mesh.lane.Lane``) over memory of the CPU.

    Args:
        pace: When the copies happen.
        computing: When the computations do that are given to `compute`. Real ones happen ``now``.

    Attributes:
        copies: How many copies were given to the streams.
    """

    def __init__(self, pace: Pace = "late", computing: Pace = "now") -> None:
        self._rows: list[Row] = []
        self.down, self.up = Row(pace, self._rows), Row(pace, self._rows)
        self.pool = PinnedPool(_poisoned)
        self.copies = 0
        self._computing = Row(computing, self._rows)

    def takes(self, _tensor: Tensor) -> bool:
        """Every tensor of a group with this lane counts as one on the device."""
        return True

    def current(self) -> Row:
        """Return the stream that computes."""
        return self._computing

    def record(self, stream: Row) -> Point:
        """Return the point behind all that ``stream`` has been given."""
        return Point(stream, stream.given)

    def copy(self, target: Tensor, source: Tensor, stream: Row) -> None:
        """Let ``stream`` copy; it holds neither tensor, as a card does not."""
        assert target.is_contiguous() and source.is_contiguous()
        assert (target.dtype, target.numel()) == (source.dtype, source.numel())
        refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in (target, source)]
        places = [tensor.data_ptr() for tensor in (target, source)]
        nbytes = target.numel() * target.element_size()

        def move() -> None:
            if any(ref.expired() for ref in refs):
                raise AssertionError("the memory of a copy was freed before the copy was over")
            ctypes.memmove(*places, nbytes)

        self.copies += 1
        stream.give(move)

    def compute(self, action: Callable[[], object]) -> None:
        """Give the computing stream something to do."""
        self._computing.give(action)

    def finish(self) -> None:
        """Wait for the whole device, at the end of a test."""
        # Computations first: what they do not wait for is late.
        for row in reversed(self._rows):
            row.reach(row.given)


def _poisoned(nbytes: int) -> Tensor:
    with torch.inference_mode(mode=False):
        return torch.full((nbytes,), POISON, dtype=torch.uint8)


@contextmanager
def staged(lane: FakeLane) -> Iterator[FakeLane]:
    """Let meshes that are made inside treat the CPU as a device behind ``lane``."""
    with patch.object(mesh_module, "lane_for", lambda _device: lane):
        yield lane
