"""The number of tokens that a global batch learns from.

A mean over each replica's own tokens, averaged over replicas, weights tokens of a replica with much
padding more. The loss of one process over the whole batch is the sum over valid tokens divided by
their number, so the number is summed over dp; the sum travels while the forward runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.comm.collectives import Pending, all_reduce
from goose_strategy.tensor_parallel.loss import valid_token_count

if TYPE_CHECKING:
    from goose_strategy.runtime.batch import Batch


class TokenCount:
    """Valid target tokens of the global batch, summed over dp while the forward runs.

    Args:
        local: Valid tokens of this replica, an int64 scalar tensor.
        group: The dp group, or ``None``.
    """

    def __init__(self, local: Tensor, group: ProcessGroup | None) -> None:
        self._value = local
        self._pending: Pending | None = None
        if group is not None:
            self._pending = all_reduce(self._value, group, async_op=True)

    def wait(self) -> Tensor:
        """Return the global count, at least 1, once every replica has added its own."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            self._warn_if_nothing_to_learn()
            self._value = self._value.clamp(min=1)
        return self._value

    @classmethod
    def of(cls, batches: list[Batch], group: ProcessGroup | None) -> TokenCount:
        """Count the labels of ``batches`` and start the sum over dp."""
        counts = [_count(batch) for batch in batches]
        local = counts[0] if len(counts) == 1 else torch.stack(counts).sum()
        count = cls(local, group)
        if group is None:
            count._warn_if_nothing_to_learn()
            count._value = local.clamp(min=1)
        return count

    def _warn_if_nothing_to_learn(self) -> None:
        # Reading the count would stall a CUDA device in every step; there the loss of 0 speaks.
        if self._value.device.type == "cpu" and int(self._value) == 0:
            warnings.warn(
                "Every label of the global batch is -100: the loss is 0 and nothing is learned "
                "from this batch.",
                UserWarning,
                stacklevel=2,
            )


class SampleSwitch:
    """Tells a loss whether it is one of a private call, a sum over samples of their own means.

    Evaluation of the same model takes the mean over all tokens, as everywhere.
    """

    def __init__(self) -> None:
        self._on = False

    def __call__(self) -> bool:
        """Return whether a private call runs."""
        return self._on

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Surround a private call."""
        before, self._on = self._on, True
        try:
            yield
        finally:
            self._on = before


def _count(batch: Batch) -> Tensor:
    shifted = batch.get("shift_labels")
    if shifted is not None:
        return valid_token_count(shifted, shift=False)
    return valid_token_count(batch["labels"], shift=True)
