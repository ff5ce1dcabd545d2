"""The native step of one optimizer: what its shards share, and the decision to take the step.

A non-finite gradient makes every rank skip the step, before anything is written: the norm is summed
over the world, so all ranks see the same number. Other optimizers write NaN into the weights, or
skip on one rank only, or skip without a word; here skips are counted and told.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.errors import BatchError, ConfigError
from goose_strategy.optim.clock import Clock
from goose_strategy.optim.native import CLOCK, NativeShard
from goose_strategy.optim.rules import Rule, keeps_first, rule_of
from goose_strategy.optim.storage import storage_of

if TYPE_CHECKING:
    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.data_parallel.reducer import Reducer
    from goose_strategy.optim.segments import State


class NativeSteps:
    """Steps native shards together.

    Args:
        reducer: Knows the parameters and the settings.
        optimizer: The user's optimizer; its groups are read at every step.

    Attributes:
        clock: Hyperparameters and step counts.
    """

    def __init__(self, reducer: Reducer, optimizer: Optimizer) -> None:
        rule = rule_of(optimizer)
        if rule is None:
            raise ConfigError(f"optimizer={type(optimizer).__name__} has no native step.")
        self._rule: Rule = rule
        self._mesh = reducer.mesh
        self._config = reducer.config
        self._optimizer = optimizer
        self._has_first = keeps_first(rule, optimizer)
        self.clock = Clock(rule, reducer.mesh.device)
        self._todo: list[tuple[NativeShard, list[bool]]] = []
        self._told = 0
        self._counters: Tensor | None = None
        self._event: torch.Event | None = None

    def make(self, bucket: Bucket) -> NativeShard:
        """Return a shard whose parameters were never stepped."""
        shard = NativeShard(
            bucket,
            storage_of(self._config, bucket.key.dtype),
            self._rule,
            mesh=self._mesh,
            has_first=self._has_first,
        )
        shard.rows = self.clock.rows_at(shard.steps_of({}))
        return shard

    # -- the step ------------------------------------------------------------------------------

    def prepare(self, shards: Sequence[NativeShard], norm2: Tensor) -> list[NativeShard]:
        """Decide whether the step is taken. Everything but `run` is done afterwards.

        Args:
            shards: All shards of the optimizer.
            norm2: Sum over the model of a power of the gradients; finite if they are.

        Returns:
            The shards that have a gradient.

        Raises:
            ConfigError: If a momentum was set that the optimizer did not have at first.
            BatchError: If too many steps in a row were skipped; alike on all ranks.
        """
        if keeps_first(self._rule, self._optimizer) and not self._has_first:
            raise ConfigError(
                "momentum was 0 when the optimizer was set up and is not any more; build the "
                "optimizer with the momentum that it will have."
            )
        presence = [(shard, shard.present()) for shard in shards]
        active = self._divide(presence)
        self.clock.prepare(self._optimizer.param_groups, active, norm2)
        # A slice may lie between parameters, or hold none that is used: its bucket still is.
        self._todo = [
            (shard, present)
            for shard, present in presence
            if any(slot.param.grad is not None for slot in shard.bucket.slots)
        ]
        self._tell_skips()
        return [shard for shard, _ in self._todo]

    def run(self) -> None:
        """Take the step that was prepared; it changes nothing if it is to be skipped."""
        for shard, present in self._todo:
            shard.step(self.clock, present=present)
            shard.note_weights()
        self._todo = []

    def _divide(self, presence: Sequence[tuple[NativeShard, list[bool]]]) -> set[int]:
        """Divide rows of which some parameters have no gradient; return those that have one."""
        seen: defaultdict[int, set[bool]] = defaultdict(set)
        for shard, present in presence:
            for row, has in zip(shard.rows, present, strict=True):
                seen[row].add(has)
        resting = {row: self.clock.divide(row) for row, kinds in seen.items() if len(kinds) == 2}
        for shard, present in presence if resting else ():
            shard.rows = [
                row if has else resting.get(row, row)
                for row, has in zip(shard.rows, present, strict=True)
            ]
        return {row for row, kinds in seen.items() if True in kinds}

    # -- skips ---------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """Steps that were skipped so far; on a device the host waits for the answer."""
        return int(self.clock.state.skipped)

    def _tell_skips(self) -> None:
        """Warn of skipped steps; on a device of those that were skipped up to the step before."""
        counters = self.clock.state.counters
        if counters.device.type == "cpu":
            self._judge(counters)
            return
        if self._counters is not None and self._event is not None:
            self._event.synchronize()
            self._judge(self._counters)
        self._counters = counters.to("cpu", non_blocking=True)
        self._event = torch.Event(counters.device)
        self._event.record()

    def _judge(self, counters: Tensor) -> None:
        taken, skipped, in_a_row, _ = counters.tolist()
        if skipped > self._told and self._mesh.rank == 0:
            warnings.warn(
                f"the gradients were not finite, so the optimizer's step was skipped: "
                f"{skipped} of {taken + skipped} so far, {in_a_row} in a row.",
                UserWarning,
                stacklevel=2,
            )
        self._told = skipped
        if in_a_row > self._config.max_skipped:
            raise BatchError(
                f"{in_a_row} steps in a row were skipped because the gradients were not finite, "
                f"and max_skipped={self._config.max_skipped}. The weights are those of the last "
                "step that was taken; look for the first NaN in the loss or in the data."
            )

    # -- states --------------------------------------------------------------------------------

    def install(
        self, found: Sequence[tuple[NativeShard, Mapping[str, State]]], *, everything: bool
    ) -> None:
        """Replace the states of shards.

        Args:
            found: Each shard with its states by parameter name.
            everything: Whether these are all shards, whose common count is replaced, too.
        """
        if everything:
            states = [state for _, by_name in found for state in by_name.values()]
            counts = [
                int(state[key]) for state in states for key in (CLOCK, "step") if key in state
            ]
            self.clock.clear(max(counts, default=0))
        wanted = [shard.steps_of(by_name) for shard, by_name in found]
        rows = self.clock.rows_at([pair for pairs in wanted for pair in pairs])
        for (shard, by_name), pairs in zip(found, wanted, strict=True):
            shard.rows, rows = rows[: len(pairs)], rows[len(pairs) :]
            shard.install(by_name)

    def agree(self) -> None:
        """Take the largest count of any rank after states were installed. Collective.

        A rank that steps few parameters, or none, may not have seen one that was always stepped.
        """
        count = self.clock.state.counters[:1].cpu()
        all_reduce(count, self._mesh.control, op="max")
        self.clock.state.counters[0] = count[0]
