"""The two hooks of a parameter: before and after autograd accumulates into its gradient.

``DistributedDataParallel`` hooks the accumulation nodes from C++. These two are public torch API
and cost about two microseconds per parameter and backward; all they need is in their closures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from goose_strategy.data_parallel.bucket import Bucket
    from goose_strategy.grads.buffer import GradSlot
    from goose_strategy.grads.ready import ReadyCounter


def hook_slot(slot: GradSlot, bucket: Bucket, ready: ReadyCounter) -> list[RemovableHandle]:
    """Install both hooks.

    Args:
        slot: The parameter and its place.
        bucket: The bucket of the slot.
        ready: Counts the parameter once its gradient is complete.

    Returns:
        What removes them.
    """
    buffer = bucket.grads
    view = slot.view
    stage = bucket.key.stage

    def before(_: Tensor) -> None:
        # Runs before the accumulation, which would add to a stale or travelling view.
        if buffer.closed:
            buffer.open()

    def after(param: Tensor) -> None:
        if param.grad is not view:
            buffer.adopt(slot)
        ready.dirty = True
        if not ready.counting or slot.round == ready.round:
            return
        if stage is None or ready.stage is None or ready.stage == stage:
            slot.round = ready.round
            ready.mark(bucket.index)

    return [
        slot.param.register_hook(before),
        slot.param.register_post_accumulate_grad_hook(after),
    ]
