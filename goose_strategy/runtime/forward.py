"""The ``forward`` that replaces a model's own: it runs the whole step of the whole mesh.

``model(**batch)`` keeps its signature and its output type. What changes is what stands behind it:

* **direct** (``pp == 1``): plain autograd. Labels given, the loss is the sum over valid tokens
  divided by the valid tokens of the *global* batch, the same number on every rank.
* **pipelined** (``pp > 1``): the call runs the whole schedule, forward and backward, and keeps
  the gradients; the loss it returns carries one autograd node whose backward releases them
  (see :mod:`goose_strategy.pipeline_parallel.bridge`).

A strategy that ran the schedule in its own ``training_step`` would take the step out of the
user's hands; this way Fabric loops and LightningModules stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.errors import BatchError
from goose_strategy.runtime.batch import Batch, Binder, check_not_empty, refuse_cache
from goose_strategy.runtime.counting import TokenCount

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from goose_strategy.runtime.model import ShardedModel


class _GlobalLoss(torch.autograd.Function):
    """Sum of the replicas' losses in value; the gradient flows into this replica's own part.

    The reducer averages gradients over dp, as ``ddp`` does for any module. This loss is already
    divided by the global token count, so its gradient is multiplied by dp to make the average a
    sum. For a power of two both factors are exact.
    """

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: ProcessGroup, dp_size: int) -> Tensor:
        ctx.dp_size = dp_size
        total = loss.detach().clone()
        all_reduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.dp_size, None, None


class DirectForward:
    """The forward of a causal LM that is whole in depth (``pp == 1``).

    Args:
        model: The sharded model it belongs to.
        original: The model's own bound ``forward``.
    """

    def __init__(self, model: ShardedModel, original: Callable[..., Any]) -> None:
        self._model = model
        self._original = original
        self._bind = Binder(original)
        # transformers asks for it: generate() passes an attention mask only to who takes one.
        self.__signature__ = self._bind.signature

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the plain forward of the copied model, which is a model of its own."""
        copied: Callable[..., Any] = copy.deepcopy(self._original, memo)
        return copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; see :mod:`goose_strategy.runtime.forward`."""
        model = self._model
        model.prepare_gradients()
        batch = self._bind(args, kwargs)
        check_not_empty(batch)
        (batch,) = model.guard([batch])
        if batch.get("labels") is None:
            with model.watch("forward"):
                return self._original(**batch)
        as_tuple = batch.pop("return_dict", None) is False
        group = model.mesh.dp if model.global_loss else None
        count = None if "num_items_in_batch" in batch else TokenCount.of([batch], group)
        with model.watch("forward"), model.counting(count):
            output = self._original(**batch, return_dict=True)
        if group is not None:
            to_global: Callable[..., Tensor] = _GlobalLoss.apply
            output.loss = to_global(output.loss, group, model.mesh.dp_size)
        return output.to_tuple() if as_tuple else output


class PipelinedForward:
    """The forward of a causal LM that is cut into stages (``pp > 1``).

    Args:
        model: The sharded model it belongs to.
        original: The model's own bound ``forward``, for the names of its arguments.
    """

    def __init__(self, model: ShardedModel, original: Callable[..., Any]) -> None:
        self._model = model
        self._bind = Binder(original)
        self.__signature__ = self._bind.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the schedule over all microbatches; see :mod:`goose_strategy.runtime.forward`.

        Raises:
            BatchError: If the batch is empty or differs between the ranks of this replica.
            NotImplementedError: If a cache is passed, as ``generate()`` does.
        """
        model = self._model
        model.prepare_gradients()
        batches, listed = self._batches(args, kwargs)
        for batch in batches:
            check_not_empty(batch)
            refuse_cache(batch, model.mesh.pp_size)
        batches = model.guard(batches)
        as_tuple = batches[0].pop("return_dict", None) is False
        grad = torch.is_grad_enabled()
        loss, logits = model.run_pipeline(batches, listed=listed, grad=grad)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output.to_tuple() if as_tuple else output

    def _batches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Batch], bool]:
        """Return the call's one batch, or the microbatches it was given as a list; and which."""
        if len(args) == 1 and isinstance(args[0], (list, tuple)) and not kwargs:
            if not args[0]:
                raise BatchError("The list of microbatches is empty; pass at least one dict.")
            return [self._bind((), dict(batch)) for batch in args[0]], True
        return [self._bind(args, kwargs)], False
