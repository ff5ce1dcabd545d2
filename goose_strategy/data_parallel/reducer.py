"""The gradients of one module: buckets, hooks, sums over dp, and the calls of a pipeline.

``DistributedDataParallel`` wraps a module and all-reduces every gradient to every rank. This
reducer leaves the module alone, sums each bucket to the rank that steps it, and keeps the promises
of ``p.grad`` (accumulation, ``zero_grad`` in any order, several backwards) with one flat
accumulator per bucket. See `goose_strategy.grads.buffer` for the states of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from goose_strategy.data_parallel.bucket import Bucket
from goose_strategy.data_parallel.call import CallGrads, Calls, readable
from goose_strategy.data_parallel.hooks import hook_slot
from goose_strategy.data_parallel.plan import plan_buckets, plan_entries
from goose_strategy.data_parallel.rounds import Rounds
from goose_strategy.data_parallel.wire import RoundingNotice
from goose_strategy.errors import ConfigError
from goose_strategy.grads.buffer import GradSlot, GradState

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from goose_strategy.data_parallel.config import ZeroConfig
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.mesh.shard import ShardSpec

Owner = tuple[int, int]


class Reducer:
    """Buckets of a module's trainable parameters and everything that happens to their gradients.

    Two ways of use. *Direct* (``pp == 1``): plain ``loss.backward()`` followed by
    `finish_backward`. *Calls* (``pp > 1``): `begin_call`, the schedule's backwards with
    `completing` around the last of each stage, `end_call`, and `release` when the user's backward
    comes. Both end in `finalize` before gradients are clipped or stepped.

    After a sum over dp, only this rank's slice of each bucket holds it: elsewhere ``p.grad`` is
    stale. `full_gradients` gathers whole gradients for those who want to look at them.

    Attributes:
        mesh: The mesh whose dp axis is reduced over.
        average: Whether sums over dp are divided by dp.
        config: Size of the buckets, and the types of gradients and states.
        rounding: Tells of gradients that are rounded more than once per step.
        factors: Sum of the factors released since it was last taken, for the check that they are
            equal on all ranks; ``None`` if no call began since then, which all ranks know alike.
        generation: Counts the changes of the buckets.
    """

    def __init__(  # noqa: PLR0913  all of it is known at once, and by nobody else
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        specs: Mapping[str, ShardSpec],
        mesh: ParallelMesh,
        *,
        config: ZeroConfig,
        average: bool,
        owner_of: Mapping[str, Owner],
        stage_of: Mapping[str, int] | None = None,
    ) -> None:
        """Move the trainable parameters into buckets and install the hooks.

        Args:
            params: All parameters of the module by name, frozen ones included; a parameter with
                two names counts under its first.
            specs: Their layouts; a parameter without one is replicated over tp.
            mesh: Groups of the sums.
            config: Size of the buckets.
            average: Divide the sum over dp by dp, as ``ddp`` does.
            owner_of: Optimizer index and group index by name, of those that are optimized.
            stage_of: Stage by name, where a rank holds several; a parameter without an entry is
                used by several of them. ``None`` or empty if they need not be told apart.
        """
        self.mesh = mesh
        self.average = average
        self.factors: float | Tensor | None = None
        self.generation = 0
        self.config = config
        self.rounding = RoundingNotice(config, mesh)
        self._specs = dict(specs)
        self._owner_of: dict[str, Owner] = dict(owner_of)
        self._stage_of = dict(stage_of or {})
        self._params = _unique(params)
        self._names = {id(param): name for name, param in self._params.items()}
        self._outside = set(self._params)
        self._sync = True
        self._handles: list[RemovableHandle] = []
        self._slots: dict[int, tuple[Bucket, GradSlot]] = {}
        self._rounds = Rounds(mesh, [])
        self._calls = Calls(self._rounds, overlap=config.overlap_reduce)
        self._install(self._build(self._waiting()))

    # -- set-up --------------------------------------------------------------------------------

    def _waiting(self) -> list[str]:
        """Return the trainable parameters that have no bucket yet, in module order."""
        if not self._outside:
            return []
        return [
            name
            for name, param in self._params.items()
            if param.requires_grad and name in self._outside and param.numel()
        ]

    def _build(self, names: Iterable[str]) -> list[Bucket]:
        wanted = [(name, self._params[name]) for name in names]
        entries = plan_entries(
            wanted,
            self._specs,
            self._owner_of,
            tp_size=self.mesh.tp_size,
            narrow=self.config.grads == "bf16",
            stage_of=self._stage_of,
        )
        layouts = plan_buckets(
            entries, dp_size=self.mesh.dp_size, bucket_numel=self.config.bucket_numel
        )
        self._outside.difference_update(name for name, _ in wanted)
        make = partial(Bucket, average=self.average, narrow_wire=self.config.wire == "bf16")
        return [make(layout, self._params, self.mesh) for layout in layouts]

    def _install(self, buckets: list[Bucket]) -> None:
        self.generation += 1
        for handle in self._handles:
            handle.remove()
        self._rounds.set_buckets(sorted(buckets, key=lambda bucket: bucket.key.turn))
        self._set_counting()
        self._slots = {id(slot.param): (b, slot) for b in self.buckets for slot in b.slots}
        self._handles = [
            handle
            for bucket, slot in self._slots.values()
            for handle in hook_slot(slot, bucket, self._rounds.ready)
        ]

    @property
    def buckets(self) -> list[Bucket]:
        """All buckets, in launch order."""
        return self._rounds.buckets

    def slot_of(self, param: nn.Parameter) -> tuple[Bucket, GradSlot] | None:
        """Return the place of a parameter, or ``None`` if it is in no bucket."""
        return self._slots.get(id(param))

    def name_of(self, param: nn.Parameter) -> str | None:
        """Return the name of one of the module's parameters, or ``None`` if it is foreign."""
        return self._names.get(id(param))

    @property
    def owners(self) -> Mapping[str, Owner]:
        """Optimizer index and group index by name, frozen parameters included."""
        return self._owner_of

    @property
    def wide(self) -> bool:
        """Whether any of the module's parameters is fp64, frozen ones included."""
        return any(param.dtype == torch.float64 for param in self._params.values())

    @property
    def round(self) -> tuple[int, int]:
        """What changes whenever gradients were summed or grouped anew."""
        return self.generation, self._rounds.ready.round

    def gradient_buckets(self) -> list[Bucket]:
        """Return all buckets with reduced gradients, to be clipped. Collective if they were not."""
        self.finalize()
        return self.buckets

    # -- direct mode ---------------------------------------------------------------------------

    @property
    def sync(self) -> bool:
        """Whether backwards sum over dp; off while gradients accumulate locally."""
        return self._sync

    @sync.setter
    def sync(self, value: bool) -> None:
        if not value:
            self.rounding("every backward without sync")
        self._sync = value
        self._set_counting()

    def _set_counting(self) -> None:
        self._rounds.ready.counting = (
            self._sync and self.config.overlap_reduce and not self._calls.running
        )

    def finish_backward(self) -> None:
        """End a backward in direct mode: flush the buckets that are not ready, and wait.

        To be called on every rank after each backward, also on one whose loss used no parameter.
        Collective over dp, unless `sync` is off. With ``pp > 1`` the calls have reduced what they
        released, and only what reached parameters past them is left to do.
        """
        by_calls = self.mesh.pp_size > 1
        if self._sync and (not by_calls or self._rounds.unfinished):
            self._rounds.finish()
        elif not by_calls:
            self._rounds.ready.dirty = True
        self._settle()

    def finalize(self) -> None:
        """Make every gradient reduced, before it is clipped or stepped. Collective if it was not.

        Raises:
            RuntimeError: If a call is running.
        """
        if self._calls.running:
            raise RuntimeError("gradients were asked for while a pipelined call is running")
        if self._waiting():
            self.regroup({})
        if self._rounds.unfinished:
            self._rounds.finish()
        self._settle()
        for bucket in self.buckets:
            bucket.grads.attached()

    def _settle(self) -> None:
        for bucket in self.buckets:
            bucket.grads.settle()

    # -- calls ---------------------------------------------------------------------------------

    def begin_call(self, sync: bool) -> CallGrads:  # noqa: FBT001
        """Empty ``p.grad`` so that a schedule can accumulate a call's gradients.

        Args:
            sync: Whether they will be summed over dp. Local gradients that were released earlier
                are then summed first, while the schedule warms up.

        Returns:
            The owner of the call's gradients.

        Raises:
            RuntimeError: If another call has not ended.
        """
        call = self._calls.begin(sync=sync)
        self.factors = 0.0 if self.factors is None else self.factors
        return call

    def completing(self, stage: int) -> AbstractContextManager[None]:
        """Surround an action after which gradients of ``stage`` are complete.

        That is the last backward of the stage in the call. Where a backward is split, it is the
        last that computes input gradients, and the last that computes weight gradients: each is the
        last contribution to the parameters that accumulate in it. Buckets start inside of these
        blocks; all others, and what other stages accumulate meanwhile, wait for `end_call`.

        Args:
            stage: Its number, as in ``stage_of``.
        """
        return self._calls.completing(stage)

    def end_call(self, call: CallGrads) -> CallGrads:
        """Take the call's gradients and put back what ``p.grad`` was. Collective if it syncs.

        Returns:
            The call itself. Its gradients go with it when it is dropped.
        """
        self._calls.end(call)
        self._set_counting()
        return call

    def release(self, call: CallGrads, factor: float | Tensor = 1.0) -> None:
        """Add ``factor`` times the call's gradients to ``p.grad``.

        Args:
            call: What `end_call` returned.
            factor: A number or a scalar tensor, equal on all ranks. A tensor on a device is never
                read by the host.

        Raises:
            RuntimeError: If the call was released before.
        """
        factor = readable(factor)
        self._calls.release(call, factor)
        self.factors = factor if self.factors is None else self.factors + factor

    # -- the rest ------------------------------------------------------------------------------

    def full_gradients(self) -> dict[str, Tensor]:
        """Return the whole reduced gradients by name, local to this tp rank. Collective over dp.

        Returns:
            A copy of each gradient that exists, in the parameter's shape and the accumulator's
            dtype.
        """
        self.finalize()
        gradients = {}
        for bucket in self.buckets:
            whole = bucket.gather_gradients()
            for slot in bucket.grads.attached():
                part = whole[slot.start : slot.stop]
                gradients[slot.name] = part.view(slot.param.shape).clone()
        return gradients

    def regroup(self, owner_of: Mapping[str, Owner]) -> None:
        """Give buckets to parameters that were frozen or in no optimizer before.

        Nothing happens if there are none; else it is collective. Gradients survive: reduced ones
        stay reduced, those of parameters without a bucket so far are this rank's own and will be
        reduced.

        Args:
            owner_of: Optimizer index and group index of the parameters that were added.

        Raises:
            ConfigError: If a parameter would change from one optimizer group to another.
        """
        moving = {name for name in owner_of if self._owner_of.get(name) != owner_of[name]}
        for name in moving & self._owner_of.keys():
            raise ConfigError(
                f"parameter {name!r} moved to another optimizer group; make a new optimizer and "
                "set it up instead."
            )
        self._owner_of.update(owner_of)
        fresh = self._waiting()
        old = [b for b in self.buckets if any(slot.name in moving for slot in b.slots)]
        if not fresh and not old:
            return
        if self._rounds.unfinished:
            self._rounds.finish()
        self._settle()
        reduced = self._dissolve(old)
        new = self._build(name for name in self._params if name in reduced or name in fresh)
        for bucket in new:
            _bring_back(bucket, reduced)
        self._install([b for b in self.buckets if b not in old] + new)
        self._rounds.ready.dirty = bool(fresh)

    def _dissolve(self, buckets: list[Bucket]) -> dict[str, Tensor | None]:
        """Take buckets apart; return the whole reduced gradient of their parameters by name."""
        reduced: dict[str, Tensor | None] = {}
        for bucket in buckets:
            present = {slot.name for slot in bucket.grads.attached()}
            whole = bucket.gather_gradients()
            for slot in bucket.slots:
                part = whole[slot.start : slot.stop].view(slot.param.shape)
                reduced[slot.name] = part if slot.name in present else None
            self._outside.update(slot.name for slot in bucket.slots)
            bucket.release()
        return reduced

    def close(self) -> None:
        """Remove the hooks and give every parameter its own storage; gradients are dropped."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._slots.clear()
        for bucket in self.buckets:
            bucket.grads.settle()
            bucket.release()
        self._outside.update(self._params)
        self._rounds.set_buckets([])


def _bring_back(bucket: Bucket, reduced: Mapping[str, Tensor | None]) -> None:
    """Fill a new bucket: whole reduced gradients first, then the local ones of new parameters."""
    grads = bucket.grads
    local: list[tuple[GradSlot, Tensor]] = []
    for slot in bucket.slots:
        known = reduced.get(slot.name)
        if known is not None:
            slot.view.copy_(known)
            slot.param.grad = slot.view
            grads.state = GradState.REDUCED
        elif slot.param.grad is not None:
            local.append((slot, slot.param.grad))
            slot.param.grad = None
    if local:
        grads.open()
    for slot, grad in local:
        slot.param.grad = grad
        grads.adopt(slot)


def _unique(params: Sequence[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Return parameters by their first name."""
    seen: dict[int, str] = {}
    for name, param in params:
        seen.setdefault(id(param), name)
    return {name: param for name, param in params if seen[id(param)] == name}
