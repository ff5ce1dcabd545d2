"""This rank's slice of one bucket, stepped by `cuda_ops` in whatever storage was chosen.

The sibling of `goose_strategy.optim.segments.Shard`, which torch steps. The state lies in flat
tensors of the chosen types, in blocks that begin at a parameter's own elements, and stochastic
rounding draws from (name, element, step): the same bits however the model is cut over dp, pp and
buckets, and on every copy of a tied weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cuda_ops import ops
from cuda_ops.layout import Main, Moment, Segment, Segments, rounding_key
from cuda_ops.layout import Shard as FlatShard
from goose_strategy.optim.blocks import restore_moment
from goose_strategy.optim.segments import Piece, State, pieces_of, written_over

if TYPE_CHECKING:
    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.optim.clock import Clock
    from goose_strategy.optim.rules import Rule
    from goose_strategy.optim.storage import Storage

CLOCK = "clock"
"""Key of the number of steps that the optimizer has taken, beside a parameter's own ``step``."""

_CHUNK = 2048
_WORDS = 512
_ROWS = 512


class NativeShard:
    """State of this rank's slice of one bucket.

    Args:
        bucket: The bucket.
        storage: What the state is kept in.
        rule: How the optimizer is stepped.
        mesh: Where the ranks are.
        has_first: Whether there is a first moment.

    Attributes:
        bucket: The bucket.
        pieces: Parts of parameters in the slice, in order.
        rows: Row of the optimizer's clock of each piece.
        flat: The tensors.
        separate: Whether the main weights know more than the weights.
    """

    def __init__(
        self,
        bucket: Bucket,
        storage: Storage,
        rule: Rule,
        *,
        mesh: ParallelMesh,
        has_first: bool,
    ) -> None:
        own = bucket.own_weights
        narrow = own.dtype == torch.bfloat16
        self.bucket = bucket
        self.pieces: list[Piece] = pieces_of(bucket)
        self.rows: list[int] = []
        self._rule = rule
        self.separate = narrow and storage.main != Main.BF16
        self.flat = FlatShard.allocate(
            own.numel(),
            main=storage.main,
            exp_avg=storage.exp_avg if has_first else Moment.NONE,
            exp_avg_sq=storage.exp_avg_sq if rule.second is not None else Moment.NONE,
            weight=own if narrow else None,
            rest=None if narrow else own,
            device=own.device,
        )
        if self.separate and storage.main == Main.FP32:
            self.set_main(own.float())
        key = bucket.key
        tp_rank = mesh.tp_rank if mesh.tp_size > 1 and not key.tp_replicated else None
        self._keys = [rounding_key(key.tie or piece.slot.name, tp_rank) for piece in self.pieces]
        self._tables: dict[tuple[int, ...], Segments] = {}
        self._digest: Tensor | None = None
        self.note_weights()

    # -- the step ------------------------------------------------------------------------------

    def present(self) -> list[bool]:
        """Return which pieces have a gradient."""
        return [piece.slot.param.grad is not None for piece in self.pieces]

    def step(self, clock: Clock, *, present: list[bool]) -> None:
        """Step the pieces that have a gradient, and write the weights.

        Args:
            clock: Prepared for this step.
            present: Which pieces have a gradient.
        """
        if not any(present):
            return
        groups = tuple(row if has else -1 for row, has in zip(self.rows, present, strict=True))
        table = self._tables.get(groups)
        if table is None:
            # One pattern at a time: they change rarely, and tables would pile up otherwise.
            self._tables = {groups: self._table(groups)}
            table = self._tables[groups]
        ops.step(self.flat, self.bucket.grads.own, segments=table, state=clock.state)

    def _table(self, groups: tuple[int, ...]) -> Segments:
        segments = [
            Segment(start=piece.start, group=group, key=key, first=piece.first_of(self.bucket))
            for piece, group, key in zip(self.pieces, groups, self._keys, strict=True)
        ]
        numel = self.bucket.own_weights.numel()
        return Segments.build(numel, segments, device=self.bucket.own_weights.device)

    # -- main weights --------------------------------------------------------------------------

    def main_values(self) -> Tensor:
        """Return the main weights ``[n]`` in fp32; not to be written to."""
        return ops.join_main(self.flat)

    def set_main(self, values: Tensor) -> None:
        """Set the main weights, and the weights to what they round to.

        Args:
            values: ``[n]`` fp32.
        """
        ops.split_main(self.flat, values)
        self.note_weights()

    def publish(self) -> None:
        """Do nothing: the weights are written along with the main weights."""

    def note_weights(self) -> None:
        """Remember the weights as they are, to notice later that somebody wrote them."""
        if self._is_split and self.bucket.own_weights.device.type == "cpu":
            self._digest = _digest(self.bucket.own_weights)

    @property
    def _is_split(self) -> bool:
        return self.flat.main in (Main.SPLIT16, Main.SPLIT8)

    @property
    def checks_weights(self) -> bool:
        """Whether weights written from outside have to be looked for.

        A split main weight begins with the weight's own bits, so it follows by itself, up to the
        remainder of what was there before: less than half the spacing of bf16. On a device, where
        looking costs the host a wait, it is left at that.
        """
        return self.separate and (not self._is_split or self._digest is not None)

    def _written(self) -> Tensor:
        """Return where weights were written, by element or by chunk of 2048."""
        own = self.bucket.own_weights
        if self._digest is not None:
            return _digest(own) != self._digest
        rest = self.flat.rest
        return written_over(own, own if rest is None else rest)

    def differs(self) -> Tensor:
        """Return whether the weights were written since the last step, a bool scalar."""
        return self._written().any()

    def rebuild_main(self) -> None:
        """Take over the weights wherever they were written."""
        own, rest = self.bucket.own_weights, self.flat.rest
        if not self.separate or rest is None:
            return
        if self._is_split:
            if self._digest is None:
                rest.zero_()
            else:
                rest.view(-1, _CHUNK)[self._written()] = 0
                self.note_weights()
        else:
            rest.copy_(torch.where(self._written(), own.float(), rest))

    # -- state by parameter --------------------------------------------------------------------

    def states_by_piece(self, clock: Clock) -> Iterable[tuple[Piece, State]]:
        """Yield each piece that was ever stepped, with what torch would keep, in fp32."""
        steps = clock.steps.tolist()
        count = int(clock.state.step)
        flat = self.flat
        moments = {}
        if flat.exp_avg is not None:
            moments[self._rule.first] = ops.read_moment(flat.exp_avg, flat.exp_avg_scale)
        if flat.exp_avg_sq is not None and self._rule.second is not None:
            moments[self._rule.second] = ops.read_moment(flat.exp_avg_sq, flat.exp_avg_sq_scale)
        for piece, row in zip(self.pieces, self.rows, strict=True):
            if steps[row]:
                state: State = {k: v[piece.start : piece.stop] for k, v in moments.items()}
                if self._rule.counts:
                    state["step"] = torch.tensor(float(steps[row]))
                if state:
                    yield piece, {**state, CLOCK: torch.tensor(count)}

    def install(self, found: Mapping[str, State]) -> None:
        """Replace the moments of all parameters in the slice.

        Args:
            found: State by parameter name as `states_by_piece` yields it; a parameter that is
                missing has none.
        """
        flat = self.flat
        self._install(self._rule.first, flat.exp_avg, flat.exp_avg_scale, found)
        if self._rule.second is not None:
            self._install(self._rule.second, flat.exp_avg_sq, flat.exp_avg_sq_scale, found)

    def _install(
        self, key: str, codes: Tensor | None, scales: Tensor | None, found: Mapping[str, State]
    ) -> None:
        if codes is None:
            return
        values = torch.zeros(codes.numel(), dtype=torch.float32, device=codes.device)
        for piece in self.pieces:
            moment = found.get(piece.slot.name, {}).get(key)
            if moment is not None:
                values[piece.start : piece.stop].copy_(moment.view(-1))
        restore_moment(values, codes, scales)

    def steps_of(self, found: Mapping[str, State]) -> list[tuple[int, int]]:
        """Return parameter group and number of steps of each piece for a state to be installed."""
        group = self.bucket.key.group or 0
        return [(group, self._steps(found.get(piece.slot.name))) for piece in self.pieces]

    def _steps(self, state: State | None) -> int:
        if not state:
            return 0
        if self._rule.counts:
            return int(state.get("step", 0))
        return int(state.get(self._rule.first) is not None)


def _digest(weights: Tensor) -> Tensor:
    """Return one number per 2048 bf16 elements that changes when any of them does.

    Four elements are one word. Words are multiplied by odd numbers before they are added, so that
    one changed word always shows, and words that change places do, too.
    """
    words = weights.detach().view(torch.int64).view(-1, _WORDS)
    odd = torch.arange(_WORDS, dtype=torch.int64, device=weights.device)
    odd = odd * 0x9E3779B97F4A7C1 * 2 + 1
    parts = [(rows * odd).sum(dim=1) for rows in words.split(_ROWS)]
    return torch.cat(parts) if parts else words.new_zeros(0)
