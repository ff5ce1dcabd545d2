"""The flat accumulator of one bucket, and the states its gradients go through.

torch keeps a tensor of its own behind every ``p.grad``. Here ``p.grad`` is a view of one flat
tensor per bucket, so that a bucket is reduced, clipped and stepped without copies. With four
data-parallel ranks, seen from rank 1 (``n`` elements per slice):

                 0        n       2n       3n       4n
    EMPTY        |........|........|........|........|   no gradient; the storage is scratch
    LOCAL        |llllllll|llllllll|llllllll|llllllll|   sums of this rank alone
    REDUCING     |~~~~~~~~|~~~~~~~~|~~~~~~~~|~~~~~~~~|   the sum over dp is on its way
    REDUCED      |xxxxxxxx|SSSSSSSS|xxxxxxxx|xxxxxxxx|   S: sum over dp; x: stale

    EMPTY --contribution--> LOCAL --start--> REDUCING --settle--> REDUCED
                              ^                                      |
                              '---- contribution: x := 0, S kept ----'

A contribution to a REDUCED bucket zeroes what is stale and keeps S, so that the next sum over dp
counts every contribution exactly once. ``p.grad is None`` means that the user cleared the slot of
this one parameter; its part of the flat is scratch then.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from goose_strategy.comm.collectives import Pending


class GradState(Enum):
    """Where the gradients of a bucket are; see the picture in the module's docstring."""

    EMPTY = auto()
    LOCAL = auto()
    REDUCING = auto()
    REDUCED = auto()


class GradSlot:
    """One parameter's place in a `GradBuffer`.

    Attributes:
        name: Name of the parameter.
        param: The parameter.
        view: Its gradient: the elements ``[start, stop)`` of the flat, in the parameter's shape.
        start: First element in the flat.
        stop: One past the last element.
        round: Last round in which the parameter was counted as ready.
    """

    __slots__ = ("name", "param", "round", "start", "stop", "view")

    def __init__(self, name: str, param: nn.Parameter, *, flat: Tensor, start: int) -> None:
        self.name = name
        self.param = param
        self.start = start
        self.stop = start + param.numel()
        self.view = flat[start : self.stop].view(param.shape)
        self.round = 0


class Stash:
    """Gradients that are not in ``p.grad``: those of a call, or those that a call found there.

    Attributes:
        slots: The parameters that have a gradient.
        state: LOCAL or REDUCED once `values` is set.
        values: ``[n]`` (REDUCED) or the whole flat (LOCAL); ``None`` as long as nothing else
            needed the flat and they still lie there.
    """

    __slots__ = ("__weakref__", "slots", "state", "values")

    def __init__(self, slots: list[GradSlot]) -> None:
        self.slots = slots
        self.state = GradState.EMPTY
        self.values: Tensor | None = None


class GradBuffer:
    """The flat accumulator of one bucket.

    Attributes:
        flat: ``[dp * n]`` in the accumulator's dtype.
        own: This rank's slice ``[n]`` of it.
        start: First element of the slice.
        stop: One past its last element.
        slots: The parameters, in the order of their elements.
        state: See the module's docstring.
        closed: Whether `open` must be called before autograd may accumulate into a view.
        alive: Whether the parameters still have their gradients here.
    """

    __slots__ = (
        "_pending",
        "_primary",
        "_replicas",
        "_tenant",
        "alive",
        "closed",
        "flat",
        "own",
        "slots",
        "start",
        "state",
        "stop",
    )

    def __init__(
        self,
        flat: Tensor,
        slots: list[GradSlot],
        *,
        start: int,
        stop: int,
        replicas: int,
        primary: bool,
    ) -> None:
        """Take over a zeroed flat tensor.

        Args:
            flat: ``[dp * n]``; zero between the slots, which stays so.
            slots: Views of it.
            start: First element of this rank's slice.
            stop: One past its last element.
            replicas: What the sum over dp is divided by: 1 for a sum, dp for a mean.
            primary: Whether this rank brings the reduced slice into a second sum. ``False`` where
                another rank of tp (or of the tied pair) holds the same slice and brings it.
        """
        self.flat = flat
        self.slots = slots
        self.start = start
        self.stop = stop
        self.own = flat[start:stop]
        self._replicas = replicas
        self._primary = primary
        self.state = GradState.EMPTY
        self.closed = True
        self.alive = True
        self._pending: Pending | None = None
        self._tenant: weakref.ref[Stash] | None = None

    # -- contributions -------------------------------------------------------------------------

    def open(self) -> None:
        """Make the flat ready for one more contribution of this rank."""
        self.evict()
        self.settle()
        if self.state is GradState.REDUCED:
            self._spread(self.attached())
        self.state = GradState.LOCAL
        self.closed = False

    def adopt(self, slot: GradSlot) -> None:
        """Copy a ``p.grad`` that is not our view into its place and attach the view.

        Autograd makes a new tensor where the slot was cleared. A tensor assigned by hand outside
        of a backward counts as reduced already, as it does under ``ddp``.
        """
        if self.closed:
            self.evict()
            self.settle()
            if self.state is GradState.EMPTY:
                self.state = GradState.REDUCED
        grad = slot.param.grad
        if grad is None or grad is slot.view:
            return
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        slot.view.copy_(grad.detach())
        slot.param.grad = slot.view

    def attached(self) -> list[GradSlot]:
        """Return the slots that have a gradient; foreign tensors are adopted on the way."""
        found = []
        for slot in self.slots:
            grad = slot.param.grad
            if grad is not None:
                if grad is not slot.view:
                    self.adopt(slot)
                found.append(slot)
        return found

    def _spread(self, kept: list[GradSlot]) -> None:
        """Turn REDUCED into LOCAL: zero what is stale, so that the next sum counts S once."""
        if len(kept) == len(self.slots):
            self.flat[: self.start].zero_()
            self.flat[self.stop :].zero_()
            self._carry(self.own)
            return
        for slot in kept:
            first, last = self._overlap(slot)
            self.flat[slot.start : first].zero_()
            self.flat[last : slot.stop].zero_()
            self._carry(self.flat[first:last])

    def _carry(self, reduced: Tensor) -> None:
        """Weigh a reduced range so that the next sum yields it once."""
        if not self._primary:
            reduced.zero_()
        elif self._replicas != 1:
            reduced.mul_(self._replicas)

    def _overlap(self, slot: GradSlot) -> tuple[int, int]:
        """Return the part of the slot that lies in this rank's slice (empty: first == last)."""
        first = min(max(slot.start, self.start), slot.stop)
        return first, max(first, min(slot.stop, self.stop))

    # -- the sum over dp -----------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the whole flat this rank's contribution to a sum: cleared slots are zeros."""
        self.evict()
        self.settle()
        kept = self.attached()
        if self.state is GradState.REDUCED:
            self._spread(kept)
        if not kept:
            self.flat.zero_()
        elif len(kept) < len(self.slots):
            _zero_absent(self.flat, self.slots, kept, offset=0)
        self.state = GradState.LOCAL
        self.closed = False

    def start_reduce(self, pending: Pending) -> None:
        """Note that the sum over dp was launched."""
        self._pending = pending
        self.state = GradState.REDUCING
        self.closed = True

    def settle(self) -> None:
        """Wait for the sum over dp, if one is on its way."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.wait()
        if self._replicas != 1:
            self.own.mul_(1.0 / self._replicas)
        self.state = GradState.REDUCED

    def complete(self) -> None:
        """Give every trainable parameter a reduced gradient: zeros where it has none.

        Raises:
            RuntimeError: If gradients are not reduced yet.
        """
        self.evict()
        self.settle()
        self.attached()
        if self.state is GradState.LOCAL:
            raise RuntimeError("gradients were to be completed before they were reduced")
        if self.state is GradState.EMPTY:
            self.flat.zero_()
            self.state = GradState.REDUCED
        for slot in self.slots:
            if slot.param.grad is None and slot.param.requires_grad:
                slot.view.zero_()
                slot.param.grad = slot.view

    # -- gradients outside of p.grad -----------------------------------------------------------

    def park(self) -> Stash | None:
        """Take the gradients out of ``p.grad``; the storage is shared until someone needs it.

        Returns:
            The gradients, or ``None`` if no parameter had one.
        """
        slots = self.attached()
        if not slots:
            if self.state is GradState.LOCAL and self._tenant is None:
                self.state = GradState.EMPTY
                self.closed = True
            return None
        for slot in slots:
            slot.param.grad = None
        stash = Stash(slots)
        self._tenant = weakref.ref(stash)
        self.closed = True
        return stash

    def evict(self) -> None:
        """Let a stash that still lies in the flat take its values with it."""
        if self._tenant is None:
            return
        stash, self._tenant = self._tenant(), None
        self.settle()
        if stash is not None:
            reduced = self.state is GradState.REDUCED
            stash.state = self.state
            stash.values = (self.own if reduced else self.flat).clone()
            if len(stash.slots) < len(self.slots):
                offset = self.start if reduced else 0
                _zero_absent(stash.values, self.slots, stash.slots, offset=offset)
        self.state = GradState.EMPTY

    def restore(self, stash: Stash) -> None:
        """Make a stash the current gradient. No slot may have one."""
        if stash.values is not None:
            self.evict()
            self.settle()
            target = self.own if stash.state is GradState.REDUCED else self.flat
            target.copy_(stash.values)
            self.state = stash.state
            stash.values = None
        self._attach(stash.slots)

    def add(self, stash: Stash, factor: float | Tensor) -> None:
        """Add ``factor * stash`` to the current gradient; the stash is used up.

        Args:
            stash: What `park` returned.
            factor: A number, or a scalar tensor on the device (never read by the host).
        """
        attached = self.attached()
        if attached:
            self._fold(stash, factor, attached)
            return
        self.restore(stash)
        self.settle()
        if not (isinstance(factor, float) and factor == 1.0):
            (self.own if self.state is GradState.REDUCED else self.flat).mul_(factor)

    def _fold(self, stash: Stash, factor: float | Tensor, attached: list[GradSlot]) -> None:
        self.settle()
        values = stash.values
        if values is None:
            raise RuntimeError("a stash shares its storage with a gradient that is in use")
        present = {id(slot) for slot in attached}
        fresh = [slot for slot in stash.slots if id(slot) not in present]
        if stash.state is GradState.LOCAL and self.state is GradState.REDUCED:
            self.open()
        for slot in fresh:
            slot.view.zero_()
        if stash.state is GradState.LOCAL:
            _add_scaled(self.flat, values, factor)
        elif self.state is GradState.REDUCED:
            _add_scaled(self.own, values, factor)
        elif self._primary:
            _add_scaled(self.own, values, factor * self._replicas)
        self._attach(fresh)
        stash.values = None

    def _attach(self, slots: Sequence[GradSlot]) -> None:
        self._tenant = None
        self.closed = self.state is not GradState.LOCAL
        for slot in slots:
            slot.param.grad = slot.view


def _zero_absent(
    values: Tensor, slots: list[GradSlot], present: Sequence[GradSlot], *, offset: int
) -> None:
    """Zero the ranges of slots without a gradient in ``values``, which begins at ``offset``."""
    kept = {id(slot) for slot in present}
    end = offset + values.numel()
    for slot in slots:
        if id(slot) not in kept and slot.start < end and slot.stop > offset:
            values[max(slot.start - offset, 0) : min(slot.stop, end) - offset].zero_()


def _add_scaled(target: Tensor, values: Tensor, factor: float | Tensor) -> None:
    """Add ``factor * values`` in place, without reading a factor that lives on a device."""
    if isinstance(factor, Tensor):
        target.addcmul_(values, factor.to(target.dtype))
    else:
        target.add_(values, alpha=factor)
