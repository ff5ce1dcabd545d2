"""Cross entropy over a vocabulary that is cut over the tensor-parallel ranks.

transformers' ``ForCausalLMLoss`` wants whole logits and casts them to fp32, fp64 included; torch's
``loss_parallel`` needs the backward inside its context, where a pipeline has none. Here two small
all-reduces replace the gather of the logits (Shoeybi et al. 2019, arXiv:1909.08053, section 3), the
precision is ``promote(float32, logits)``, and one buffer serves as exponentials and as gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.errors import BatchError

IGNORED = -100
"""Label of a token without loss, as in transformers."""


@dataclass(frozen=True)
class VocabSlice:
    """The part of the vocabulary that this rank's logits belong to.

    Args:
        group: Ranks that hold the other parts; ``None`` if there are none.
        start: First id of this rank.
        length: Number of ids of this rank.
        size: Number of ids of all ranks.
    """

    group: ProcessGroup | None
    start: int
    length: int
    size: int

    @classmethod
    def whole(cls, size: int) -> VocabSlice:
        """Return the slice that is the whole vocabulary of ``size`` ids."""
        return cls(None, 0, size, size)


class _Options(NamedTuple):
    """Settings of one call."""

    ignore_index: int
    reuse_logits: bool


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of every token; the gradient overwrites the exponentials."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, vocabulary: VocabSlice, options: _Options
    ) -> Tensor:
        wide = torch.promote_types(torch.float32, logits.dtype)
        group = vocabulary.group
        top = logits.amax(-1).to(wide)
        all_reduce(top, group, op="max").wait()

        local = targets - vocabulary.start
        mine = (local >= 0) & (local < logits.shape[-1])
        index = local.masked_fill_(~mine, 0).unsqueeze(1)
        sums = top.new_empty(2, top.shape[0])
        sums[1] = logits.gather(1, index).squeeze(1).to(wide).sub_(top).masked_fill_(~mine, 0.0)
        if options.reuse_logits and logits.dtype == wide:
            exps = logits.sub_(top.unsqueeze(1)).exp_()
        else:
            exps = torch.sub(logits, top.unsqueeze(1)).exp_()
        torch.sum(exps, -1, out=sums[0])
        all_reduce(sums, group).wait()

        valid = targets != options.ignore_index
        unknown = (targets < 0) | (targets >= vocabulary.size)
        # A label that no rank knows must not pass as a small loss; there is no host wait for it.
        losses = sums[0].log().sub_(sums[1]).masked_fill_(unknown, torch.nan)
        ctx.save_for_backward(exps, sums[0].masked_fill(~valid, torch.inf), index, mine & valid)
        ctx.narrow = logits.dtype
        return losses.masked_fill_(~valid, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Unpacking checks the version: a second backward raises instead of using the gradient.
        exps, sumexp, index, hit = ctx.saved_tensors
        gradient = exps.mul_((grad / sumexp).unsqueeze(1))
        gradient.scatter_add_(1, index, (hit * -grad).unsqueeze(1))
        return gradient.to(ctx.narrow), None, None, None


_cross_entropy: Callable[[Tensor, Tensor, VocabSlice, _Options], Tensor] = _CrossEntropy.apply


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    vocabulary: VocabSlice | None = None,
    *,
    ignore_index: int = IGNORED,
    reuse_logits: bool = False,
    by_token: bool = False,
) -> Tensor:
    """Return the cross entropy summed over all tokens whose target is not ``ignore_index``.

    Args:
        logits: ``[tokens, vocab / tp]``, this rank's slice of the vocabulary, any float type.
        targets: ``[tokens]``, int64 ids in the whole vocabulary, equal on all ranks.
        vocabulary: Which slice that is; ``None`` if the logits are whole.
        ignore_index: Target of a token that does not count.
        reuse_logits: Overwrite the logits, for callers that drop them: no second buffer then
            exists for fp32 and fp64 logits.
        by_token: Return ``[tokens]`` instead, with zeros where nothing counts.

    Returns:
        Scalar in ``promote(float32, logits.dtype)``, equal to the last bit on all ranks; NaN if a
        target is outside the vocabulary.
    """
    vocabulary = vocabulary or VocabSlice.whole(logits.shape[-1])
    losses = _cross_entropy(logits, targets, vocabulary, _Options(ignore_index, reuse_logits))
    return losses if by_token else losses.sum()


def shifted(labels: Tensor, *, ignore_index: int = IGNORED) -> Tensor:
    """Move labels ``[..., seq]`` one place left: position ``t`` then holds the id at ``t + 1``."""
    return functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def valid_token_count(labels: Tensor, *, shift: bool = True, ignore_index: int = IGNORED) -> Tensor:
    """Count the tokens that have a loss, on the labels' device and without a host wait.

    Args:
        labels: ``[batch, seq]`` ids.
        shift: Whether the loss shifts the labels, so that the first of each row predicts nothing.
        ignore_index: Label of a token that does not count.

    Returns:
        Scalar, int64.
    """
    counted = labels[..., 1:] if shift else labels
    return (counted != ignore_index).sum()


@dataclass(frozen=True, eq=False)
class CausalLMLoss:
    """Drop-in for transformers' ``ForCausalLMLoss``; equal on all ranks of the group.

    Args:
        vocabulary: Slice that local logits belong to; ``None`` if the logits are always whole.
        reuse_logits: Overwrite local logits with their gradient, for callers that drop them.
        count: Gives the denominator of calls without ``num_items_in_batch``; called as late as
            possible, so that a sum over dp may still be under way. ``None`` from it counts as none.
        per_sample: Tells whether a call returns the sum over the rows of each one's mean over its
            own tokens: no row's share depends on another row. A row whose loss is not finite counts
            as zero.
    """

    vocabulary: VocabSlice | None = None
    reuse_logits: bool = False
    count: Callable[[], Tensor | float | None] | None = None
    per_sample: Callable[[], bool] | None = None

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,  # noqa: ARG002
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: object,  # noqa: ARG002
    ) -> Tensor:
        """Return the loss summed over valid tokens / ``num_items_in_batch``.

        Args:
            logits: ``[batch, seq, vocab / tp]``; whole logits ``[batch, seq, vocab]`` are taken
                too, on every rank.
            labels: ``[batch, seq]`` ids, not shifted.
            vocab_size: Accepted because transformers passes it; the logits' width counts.
            num_items_in_batch: Valid tokens of the whole global batch; if ``None``, what ``count``
                gives, else those of ``labels``. With zero valid tokens the loss is 0.
            ignore_index: Label of a token that does not count.
            shift_labels: ``[batch, seq]``, shifted already; taken in place of ``labels``.
            **kwargs: Ignored, as transformers passes its forward's other arguments on.

        Returns:
            Scalar in ``promote(float32, logits.dtype)``.

        Raises:
            BatchError: If a label on the CPU is outside the vocabulary, or there are no labels.
        """
        if shift_labels is None:
            if labels is None:
                raise BatchError("labels=None: the loss needs labels or shift_labels.")
            shift_labels = shifted(labels, ignore_index=ignore_index)
        width = logits.shape[-1]
        mine = self.vocabulary
        local = mine is not None and width == mine.length
        vocabulary = mine if mine is not None and local else VocabSlice.whole(width)
        targets = shift_labels.reshape(-1).to(logits.device)
        _check_targets(targets, vocabulary.size, ignore_index)
        if self.per_sample is not None and self.per_sample():
            losses = vocab_parallel_cross_entropy(
                logits.reshape(-1, width),
                targets,
                vocabulary,
                ignore_index=ignore_index,
                reuse_logits=local and self.reuse_logits,
                by_token=True,
            )
            return _sum_of_means(losses, shift_labels != ignore_index, num_items_in_batch)
        total = vocab_parallel_cross_entropy(
            logits.reshape(-1, width),
            targets,
            vocabulary,
            ignore_index=ignore_index,
            reuse_logits=local and self.reuse_logits,
        )
        if num_items_in_batch is None and self.count is not None:
            num_items_in_batch = self.count()
        if num_items_in_batch is None:
            num_items_in_batch = valid_token_count(targets, shift=False, ignore_index=ignore_index)
        return total / _nonzero(num_items_in_batch, total)


def _sum_of_means(losses: Tensor, valid: Tensor, divisor: object) -> Tensor:
    """Return the sum over rows of their means over valid tokens.

    Raises:
        BatchError: If a divisor for all rows was given, which would let them depend on one another.
    """
    if divisor is not None:
        raise BatchError(
            "num_items_in_batch divides all samples by the tokens of the whole batch, so that each "
            "one's gradient depends on the others; leave it out of private training."
        )
    rows = losses.view(valid.shape[0], -1).sum(1) / valid.sum(1).clamp(min=1).to(losses.device)
    # One row without a finite loss must not hide the others'. Its gradient is clipped to nothing.
    return torch.where(torch.isfinite(rows), rows, torch.zeros_like(rows)).sum()


def _nonzero(count: Tensor | float, total: Tensor) -> Tensor | float:
    """Return ``count``, or 1 where it is zero: the sum over no token is 0, not NaN."""
    if isinstance(count, Tensor):
        count = count.to(total.device)
        return torch.where(count == 0, torch.ones_like(count), count)
    return count or 1


def _check_targets(targets: Tensor, size: int, ignore_index: int) -> None:
    """Name a label outside the vocabulary; on a device the loss becomes NaN instead."""
    if targets.device.type != "cpu":
        return
    wrong = ((targets < 0) | (targets >= size)) & (targets != ignore_index)
    if wrong.any():
        label = int(targets[wrong][0])
        raise BatchError(
            f"label={label} is outside the vocabulary of {size} ids; use ids in [0, {size}) and "
            f"{ignore_index} for tokens without a loss."
        )
