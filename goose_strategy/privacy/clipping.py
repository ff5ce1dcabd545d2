"""Exact clipping per sample inside of a pipeline's schedule, without a second backward.

Opacus needs two backwards, or a gradient per sample. A schedule that computes input gradients
(``I``) before weight gradients (``W``) has everything at ``I`` that a norm is made of: each rank
adds up its parameters' squares per sample, one small asynchronous sum over all stages and tp ranks
gives the norms, and ``W`` computes gradients of samples that were scaled first. Nothing is computed
twice (book-keeping: Bu et al. 2022, arXiv:2210.00038; here across stages).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from goose_strategy.comm.collectives import DONE, Pending, all_reduce
from goose_strategy.errors import PrivacyError
from goose_strategy.grads.products import EmbeddingOwed, ProductOwed
from goose_strategy.grads.store import WeightGradWork
from goose_strategy.privacy.products import Products, tied_rows
from goose_strategy.privacy.rules import masked_lookup, rule_of

if TYPE_CHECKING:
    from goose_strategy.grads.store import Owed
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.privacy.classes import Share
    from goose_strategy.privacy.config import PrivacyConfig
    from goose_strategy.privacy.ties import TiedLink

Place = tuple[int, int]
MASK = "sample_mask"
"""Name of the tensor ``[rows]`` that says which rows are samples: 0 for those that only fill up."""

NARROW_MARGIN = 1 - 2**-7
"""By what clipping stays below the norm where devices round scaled gradients to 16 bits."""

_OTHER, _IN, _OUT = range(3)


@dataclass
class _Record:
    """One microbatch between its first ``I`` and its last ``W`` on this rank.

    Attributes:
        squares: ``[3, rows]``: of all parameters, or apart those of a tied weight's two uses where
            only a bound is wanted.
        mask: ``[rows]``, 1 for samples.
        works: What ``I`` left, by place.
        missing: Stages of the rank whose ``I`` has not run.
        uses: How often each parameter was used.
        tied: What both uses of a weight left that the first and the last stage share here.
        pending: The sum over ranks.
        sent: The message about a tied weight.
        factors: ``[rows]``, once they are known.
        good: Samples that are finite; ``None`` if all are.
    """

    squares: Tensor
    mask: Tensor
    works: dict[Place, WeightGradWork] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    uses: Counter[int] = field(default_factory=Counter)
    tied: list[Owed] = field(default_factory=list)
    pending: Pending = DONE
    sent: Pending = DONE
    factors: Tensor | None = None
    good: Tensor | None = None


@dataclass
class ClippingStats:
    """What clipping did since this was last cleared. It is computed from the data: not private.

    Attributes:
        norms: Per microbatch, the norms of its samples.
        masks: Per microbatch, which rows are samples.
    """

    norms: list[Tensor] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)


class SampleClipping:
    """Clips the gradients of one rank's stages; what the engine calls between ``I`` and ``W``.

    Args:
        config: The settings.
        mesh: The mesh, with its group for norms.
        stages: Numbers of this rank's stages.
        shares: What is known of every trainable parameter of this rank, by its ``id``.
        link: Messages between the two ranks that hold a tied weight, if this is one of them.
        dtype: Type of the norms.

    Attributes:
        masks: Per microbatch of the next call ``[rows]``, 0 for rows that are no samples.
        accumulating: Whether gradients may reach parameters now.
        stats: What clipping did.
        narrow: Whether gradients are rounded to 16 bits.
    """

    def __init__(
        self,
        config: PrivacyConfig,
        mesh: ParallelMesh,
        *,
        stages: Sequence[int],
        shares: Mapping[int, Share],
        link: TiedLink | None,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._stages = frozenset(stages)
        self._shares = shares
        self._link = link
        self._dtype = dtype
        self._how = Products(config.norm)
        self._records: dict[int, _Record] = {}
        self._same_input: set[int] = set()
        self._microbatches: Sequence[Mapping[str, Any]] = ()
        self.masks: Sequence[Tensor] = ()
        self.accumulating = False
        self.narrow = any(share.narrow for share in shares.values())
        self.stats = ClippingStats()

    @property
    def across_stages(self) -> bool:
        """Whether a ``W`` needs the ``I`` of all stages."""
        return self._config.clipping != "per_stage"

    @property
    def extra(self) -> int:
        """Microbatches that may be held beyond those of the schedule."""
        return self._config.extra_inflight

    @property
    def limit(self) -> float:
        """The norm to which this rank's part of a gradient is clipped."""
        limit = self._config.max_grad_norm
        if not self.across_stages:
            limit /= self._mesh.pp_size**0.5
        narrow = self.narrow or torch.is_autocast_enabled(self._mesh.device.type)
        return limit * NARROW_MARGIN if narrow else limit

    # -- what the engine calls -----------------------------------------------------------------

    def begin(self, microbatches: Sequence[Mapping[str, Any]]) -> None:
        """Note that a call begins; what a failed call left is dropped.

        Args:
            microbatches: Keyword arguments of the model; their `masks` were set before.
        """
        self._records.clear()
        self._microbatches = microbatches
        self.stats = ClippingStats()
        # A context of autocast is that of the call, the backwards run without it.
        self._limit = self.limit

    @torch.no_grad()
    def collect(self, place: Place, work: WeightGradWork) -> None:
        """Take what ``I`` left, add its squares, and start the sum when the rank has all of them.

        Raises:
            PrivacyError: If a parameter has no class, is used twice, or the samples cannot be told
                apart.
        """
        stage, microbatch = place
        record = self._records.get(microbatch)
        if record is None:
            record = self._records[microbatch] = self._new_record(microbatch)
        record.works[place] = work
        record.missing.discard(stage)
        self._add_squares(record, work.owed, microbatch)
        if not record.missing:
            self._close(record)

    def run(self, place: Place) -> None:
        """Compute and accumulate the clipped weight gradients of a place."""
        record = self._records[place[1]]
        work = record.works.pop(place)
        with torch.no_grad():
            factors = self._factors(record)
            scaled = [rule_of(owed).scaled(owed, factors, record.good) for owed in work.owed]
        del work
        self.accumulating = True
        try:
            WeightGradWork(scaled).run()
        finally:
            self.accumulating = False
        if not record.works and not record.missing:
            del self._records[place[1]]

    def end(self) -> None:
        """Check that nothing is left.

        Raises:
            PrivacyError: If an ``I`` was not followed by its ``W``.
        """
        if self._records:
            raise PrivacyError(f"weight gradients of microbatches {[*self._records]} were left.")

    # -- norms ---------------------------------------------------------------------------------

    def _new_record(self, microbatch: int) -> _Record:
        mask = self.masks[microbatch]
        mask = (mask > 0).to(device=self._mesh.device, dtype=self._dtype)
        squares = mask.new_zeros(3, mask.shape[0])
        return _Record(squares, mask, missing=set(self._stages))

    def _add_squares(self, record: _Record, every: Sequence[Owed], microbatch: int) -> None:
        rows = record.mask.shape[0]
        summed = self._sum_shares(every, rows)
        for number, owed in enumerate(every):
            rule = rule_of(owed)
            squares = rule.squares(owed, rows, self._how, summed.get(number))
            for param, square in zip(owed.parameters, squares, strict=True):
                share = self._share_of(param)
                record.uses[id(param)] += 1
                self._check_uses(record, share, param)
                if share.tied:
                    self._note_tied(record, owed, microbatch, share)
                if share.kind == "shard" or self._mesh.tp_rank == 0:
                    line = _OTHER
                    if share.tied and self._config.tied == "bound":
                        line = _IN if isinstance(owed, EmbeddingOwed) else _OUT
                    record.squares[line] += square
        self._how.forget()

    def _sum_shares(self, every: Sequence[Owed], rows: int) -> dict[int, Tensor]:
        """Sum over tp what each rank has a share of, in one exchange; return it by number.

        The square of a sum is not the sum of squares: these cannot be added up afterwards.
        """
        if self._mesh.tp is None:
            return {}
        partial = {
            number: rule_of(owed).shared(owed, rows)
            for number, owed in enumerate(every)
            if any(self._share_of(param).kind == "partial" for param in owed.parameters)
        }
        if not partial:
            return {}
        self._check_inputs([every[number] for number in partial])
        flat = torch.cat([part.reshape(-1).to(self._dtype) for part in partial.values()])
        all_reduce(flat, self._mesh.tp).wait()
        parts = flat.split([part.numel() for part in partial.values()])
        return {
            number: part.view(partial[number].shape)
            for number, part in zip(partial, parts, strict=True)
        }

    def _check_inputs(self, every: Sequence[Owed]) -> None:
        """Check once that layers of which tp ranks have shares read the same input on all of them.

        Only then is the sum of their gradients the gradient of the sum of what lies behind them.
        """
        fresh = [
            (owed.weight, owed.x)
            for owed in every
            if isinstance(owed, ProductOwed) and id(owed.weight) not in self._same_input
            if owed.weight is not None and owed.x is not None
        ]
        if not fresh:
            return
        sums = torch.stack([x.double().square().sum() for _, x in fresh])
        ends = torch.cat([sums, -sums])
        all_reduce(ends, self._mesh.tp, op="max").wait()
        high, low = ends.chunk(2)
        for (weight, _), largest, smallest in zip(
            fresh, high.tolist(), (-low).tolist(), strict=True
        ):
            if largest - smallest > 1e-6 * largest:
                raise PrivacyError(
                    f"{self._share_of(weight).name} has another input on every tp rank, so the "
                    "norms of its gradients are not known; freeze it, or use tp=1."
                )
            if largest - smallest <= 1e-6 * largest:  # Not where a sample is not finite.
                self._same_input.add(id(weight))

    def _share_of(self, param: Tensor) -> Share:
        share = self._shares.get(id(param))
        if share is None:
            raise PrivacyError(
                f"a parameter of shape {tuple(param.shape)} has a gradient but was not among the "
                "trainable ones at the set-up; set the module up again after thawing parameters."
            )
        return share

    def _check_uses(self, record: _Record, share: Share, param: Tensor) -> None:
        if record.uses[id(param)] > (2 if share.tied_here else 1):
            raise PrivacyError(
                f"{share.name} was used more than once in one microbatch, so the squares of its "
                "uses are not that of its gradient; freeze it, or train without privacy=...."
            )

    def _note_tied(self, record: _Record, owed: Owed, microbatch: int, share: Share) -> None:
        """Add twice the product of a tied weight's two gradients, once both are known."""
        if self._config.tied == "bound":
            return
        if not isinstance(owed, (EmbeddingOwed, ProductOwed)):
            raise PrivacyError(f"a tied weight was used by {type(owed).__name__}.")
        rows = record.mask.shape[0]
        # A table that is whole on every tp rank counts once, like its squares.
        twice = 2 if share.kind == "shard" or self._mesh.tp_rank == 0 else 0
        if self._link is not None:
            batch = self._microbatches[microbatch]
            if isinstance(owed, ProductOwed):
                record.sent = self._link.send(owed, batch, rows)
                return
            mine = masked_lookup(owed, rows)
            theirs = self._link.receive(mine, owed.ids, batch)
            record.squares[_OTHER] += twice * _dot(theirs, mine)
            return
        record.tied.append(owed)
        heads = [one for one in record.tied if isinstance(one, ProductOwed)]
        tables = [one for one in record.tied if isinstance(one, EmbeddingOwed)]
        if len(record.tied) < 2:
            return
        if len(heads) != 1 or len(tables) != 1 or heads[0].x is None:
            raise PrivacyError("a tied weight is used otherwise than by an embedding and a head.")
        (head,), (table,) = heads, tables
        x = heads[0].x.reshape(rows, -1, heads[0].x.shape[-1])
        ids = table.ids.reshape(rows, -1)
        theirs = tied_rows(x, head.grad.reshape(rows, x.shape[1], -1), ids)
        record.squares[_OTHER] += twice * _dot(theirs, masked_lookup(table, rows))
        record.tied.clear()

    def _close(self, record: _Record) -> None:
        """Start the sum over the ranks that hold the rest of the model."""
        if not self.across_stages:
            all_reduce(record.squares, self._mesh.tp).wait()
            return
        # A group of its own: launches on it are in the order of the microbatches on every rank.
        record.pending = all_reduce(record.squares, self._mesh.norms, async_op=True)

    def _factors(self, record: _Record) -> Tensor:
        if record.factors is not None:
            return record.factors
        record.pending.wait()
        record.sent.wait()
        other, table, head = record.squares
        both = (table.clamp(min=0).sqrt() + head.clamp(min=0).sqrt()).square()
        norms = (other + both).clamp(min=0).sqrt()
        factors = self._limit / (norms + self._config.floor)
        if self._config.clipping != "automatic":
            factors = factors.clamp(max=1.0)
        good = torch.isfinite(norms)
        record.factors = torch.where(good, factors, torch.zeros_like(factors)) * record.mask
        # Reading this is free on the CPU, and would make the host wait for a device.
        if self._mesh.device.type != "cpu" or not bool(good.all()):
            record.good = good
        self.stats.norms.append(norms)
        self.stats.masks.append(record.mask)
        return record.factors


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Return ``[rows]``, the inner products of two tensors of rows."""
    return (one * other.to(one.dtype)).sum((1, 2))
