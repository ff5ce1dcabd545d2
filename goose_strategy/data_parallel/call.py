"""Gradients of one pipelined call, between the schedule and the user's ``backward``.

A schedule has run its backwards when the forward returns, but the user may clear ``p.grad`` or
drop the loss before calling ``backward``. So a call owns its gradients:

    begin  p.grad is emptied; what was there is parked      p.grad: None    flat: A, then B
    end    the call's gradients B are parked, A is put back  p.grad: A      flat: A (or B)
    release(factor)                                          p.grad: A + factor * B

Storage is shared until somebody needs it: in ordinary training A is empty, B stays in the flat from
the first backward to the optimizer, and nothing is copied. If A is not empty, only the own slices
of what is reduced are copied; a call that does not sync keeps one full local copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from goose_strategy.data_parallel.rounds import Rounds
    from goose_strategy.grads.buffer import GradBuffer, Stash


class CallGrads:
    """The gradients of one call. Dropping it drops them.

    Attributes:
        sync: Whether they are summed over dp.
        released: Whether they were added to ``p.grad``.
        parts: The gradients by bucket, once the call has ended.
        held: What the call found in ``p.grad``, while it runs.
        was_dirty: Whether some of that was not reduced.
    """

    __slots__ = ("held", "parts", "released", "sync", "was_dirty")

    def __init__(self, *, sync: bool, was_dirty: bool) -> None:
        self.sync = sync
        self.released = False
        self.was_dirty = was_dirty
        self.held: list[tuple[GradBuffer, Stash]] = []
        self.parts: list[tuple[GradBuffer, Stash]] = []


class Calls:
    """Begins, ends and releases calls over the buckets of one reducer."""

    def __init__(self, rounds: Rounds, *, overlap: bool) -> None:
        self._rounds = rounds
        self._overlap = overlap
        self._current: CallGrads | None = None

    @property
    def running(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._current is not None

    def begin(self, *, sync: bool) -> CallGrads:
        """Empty ``p.grad`` for a call.

        Raises:
            RuntimeError: If another call has not ended.
        """
        if self._current is not None:
            raise RuntimeError("a pipelined call began before the previous one ended")
        rounds = self._rounds
        if sync and rounds.ready.dirty:
            # The released local gradients travel while the schedule warms up.
            rounds.finish()
        call = CallGrads(sync=sync, was_dirty=rounds.ready.dirty)
        rounds.ready.counting = False
        for bucket in rounds.buckets:
            stash = bucket.grads.park()
            if stash is not None:
                call.held.append((bucket.grads, stash))
        self._current = call
        return call

    @contextmanager
    def completing(self, stage: int) -> Iterator[None]:
        """Let complete buckets of ``stage`` start: its parameters get their last contribution."""
        ready = self._rounds.ready
        if self._current is None or not self._current.sync or not self._overlap:
            yield
            return
        ready.counting, ready.stage = True, stage
        try:
            yield
        finally:
            ready.counting, ready.stage = False, None

    def end(self, call: CallGrads) -> None:
        """Take the call's gradients and put back what it found.

        Raises:
            RuntimeError: If ``call`` is not the one that began last.
        """
        if call is not self._current:
            raise RuntimeError("end_call got another call than the one that is running")
        rounds = self._rounds
        rounds.ready.counting = False
        if call.sync:
            rounds.finish()
        rounds.ready.dirty = call.was_dirty
        for bucket in rounds.buckets:
            stash = bucket.grads.park()
            if stash is not None:
                call.parts.append((bucket.grads, stash))
        while call.held:
            buffer, stash = call.held.pop()
            buffer.restore(stash)
        self._current = None

    def release(self, call: CallGrads, factor: float | Tensor) -> None:
        """Add ``factor`` times the call's gradients to ``p.grad``.

        Raises:
            RuntimeError: If the call was released before, a call is running, or parameters moved
                to another bucket since.
        """
        if call.released:
            raise RuntimeError(
                "backward was called twice on the loss of one pipelined call; its gradients were "
                "released by the first. Add the losses up, or call the model again."
            )
        if self._current is not None:
            raise RuntimeError("a pipelined call was released while a call is running")
        if not all(buffer.alive for buffer, _ in call.parts):
            raise RuntimeError(
                "the parameters of a pipelined call were grouped anew before its backward; add "
                "parameter groups, and unfreeze parameters, before the model is called."
            )
        call.released = True
        while call.parts:
            buffer, stash = call.parts.pop(0)
            buffer.add(stash, factor)
        if not call.sync:
            self._rounds.ready.dirty = True


def readable(factor: float | Tensor) -> float | Tensor:
    """Return the factor as a number, unless that would make the host wait for a device."""
    if isinstance(factor, Tensor):
        return float(factor) if factor.device.type == "cpu" else factor.detach()
    return float(factor)
