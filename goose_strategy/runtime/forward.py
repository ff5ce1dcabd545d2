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
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.compat.transformers import auxiliary_loss
from goose_strategy.errors import BatchError
from goose_strategy.pipeline_parallel.probe import call_settings
from goose_strategy.privacy.clipping import MASK
from goose_strategy.runtime.batch import (
    Batch,
    Binder,
    check_not_empty,
    join_logits,
    refuse_cache,
    refuse_intermediates,
    refuse_router_loss,
)
from goose_strategy.runtime.counting import TokenCount

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from goose_strategy.runtime.handle import Handle


_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F) -> _F:
    """Keep ``torch.compile`` out of a function: a schedule with its messages is no graph.

    What a user compiled inside (a layer, say) stays compiled.
    """
    return cast("_F", torch.compiler.disable(function))


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

    def __init__(self, model: Handle, original: Callable[..., Any]) -> None:
        self._model = model
        self._original = original
        self._no_cache = call_settings(original.__self__)  # type: ignore[attr-defined]
        self._bind = Binder(original)
        # transformers asks for it: generate() passes an attention mask only to who takes one.
        self.__signature__ = self._bind.signature

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the plain forward of the copied model, which is a model of its own."""
        copied: Callable[..., Any] = copy.deepcopy(self._original, memo)
        return copied

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; see :mod:`goose_strategy.runtime.forward`.

        Raises:
            BatchError: If the batch is empty or differs between the ranks of this replica.
        """
        model = self._model
        model.prepare_gradients()
        batches, listed = name_batches(self._bind, args, kwargs)
        for batch in batches:
            check_not_empty(batch)
        batches = model.guard(batches)
        if model.config.pipeline.recompute != "none" and torch.is_grad_enabled():
            # What is computed twice cannot write into a cache of keys and values.
            batches = [{**self._no_cache, **batch} for batch in batches]
        with model.dropout(training=model.module.training):
            return self._listed(batches) if listed else self._one(batches)

    def _one(self, batches: list[Batch]) -> Any:
        """Run a call's one batch."""
        model, (batch,) = self._model, batches
        if batch.get("labels") is None:
            with model.watch("forward"):
                return self._original(**batch)
        as_tuple = batch.pop("return_dict", None) is False
        with self._counted(batches), self._auxiliary(1), model.watch("forward"):
            output = self._original(**batch, return_dict=True)
            output.loss = self._global(output.loss)
        return output.to_tuple() if as_tuple else output

    def _listed(self, batches: list[Batch]) -> Any:
        """Run a list of microbatches one after another, as a call with ``pp > 1`` would take it."""
        has_labels = all(batch.get("labels") is not None for batch in batches)
        settings = [{**batch, "return_dict": True} for batch in batches]
        with ExitStack() as stack:
            stack.enter_context(self._model.watch("forward"))
            if has_labels:
                stack.enter_context(self._counted(batches))
                stack.enter_context(self._auxiliary(len(batches)))
                if (head := self._model.surgery.head) is not None:
                    stack.enter_context(head.local())
            outputs = [self._original(**batch) for batch in settings]
            if has_labels:
                loss = self._global(torch.stack([output.loss for output in outputs]).sum())
                return CausalLMOutputWithPast(loss=loss)
        return CausalLMOutputWithPast(logits=join_logits([output.logits for output in outputs]))

    def _counted(self, batches: list[Batch]) -> AbstractContextManager[None]:
        group = self._model.mesh.dp if self._model.global_loss else None
        own = "num_items_in_batch" in batches[0]
        return self._model.counting(None if own else TokenCount.of(batches, group))

    @contextmanager
    def _auxiliary(self, calls: int) -> Generator[None, None, None]:
        """Weigh a mixture's load-balancing loss so that the sum of all calls is their mean.

        The loss over tokens is divided by all tokens already; this one is a mean of its own in
        every call of every replica.
        """
        lm = self._original.__self__  # type: ignore[attr-defined]
        name = auxiliary_loss(lm)
        if name is None:
            yield
            return
        coefficient = getattr(lm, name)
        replicas = self._model.mesh.dp_size if self._model.global_loss else 1
        setattr(lm, name, coefficient / (calls * replicas))
        try:
            yield
        finally:
            setattr(lm, name, coefficient)

    def _global(self, loss: Tensor) -> Tensor:
        """Return the loss of all replicas."""
        mesh = self._model.mesh
        if mesh.dp is None or not self._model.global_loss:
            return loss
        to_global: Callable[..., Tensor] = _GlobalLoss.apply
        return to_global(loss, mesh.dp, mesh.dp_size)


class OwnLossForward(DirectForward):
    """The forward of a model that computes its loss itself, whole in depth (``pp == 1``).

    The loss is that of this replica's rows, as the model defines it, and gradients are averaged
    over the replicas, as for any module.
    """

    def _one(self, batches: list[Batch]) -> Any:
        with self._model.watch("forward"):
            return self._original(**batches[0])

    def _listed(self, batches: list[Batch]) -> Any:
        raise BatchError(
            f"a list of {len(batches)} microbatches needs a model whose loss is a sum over tokens; "
            f"{type(self._original.__self__).__name__} computes its own, "  # type: ignore[attr-defined]
            "so that one batch is passed at a time."
        )


class PipelinedForward:
    """The forward of a causal LM that is cut into stages (``pp > 1``).

    Args:
        model: The sharded model it belongs to.
        original: The model's own bound ``forward``, for the names of its arguments.
    """

    def __init__(self, model: Handle, original: Callable[..., Any]) -> None:
        self._model = model
        self._bind = Binder(original)
        self.__signature__ = self._bind.signature

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the schedule over all microbatches; see :mod:`goose_strategy.runtime.forward`.

        Raises:
            BatchError: If the batch is empty or differs between the ranks of this replica, or asks
                for what is spread over the stages.
            NotImplementedError: If a cache is passed, as ``generate()`` does.
        """
        model = self._model
        model.prepare_gradients()
        batches, listed = name_batches(self._bind, args, kwargs)
        for batch in batches:
            check_not_empty(batch)
            refuse_cache(batch, model.mesh.pp_size)
            refuse_router_loss(batch, model.mesh.pp_size)
            refuse_intermediates(batch, model.mesh.pp_size)
        batches = model.guard(batches)
        as_tuple = batches[0].pop("return_dict", None) is False
        grad = torch.is_grad_enabled()
        with model.dropout(training=model.module.training):
            loss, logits = model.run_pipeline(batches, listed=listed, grad=grad)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output.to_tuple() if as_tuple else output


class PrivateForward(DirectForward):
    """The forward of a causal LM that is whole in depth and trained privately.

    Calls with labels run through a schedule of one stage, like those of `PipelinedForward`; all
    others are plain.
    """

    @uncompiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call; see :mod:`goose_strategy.runtime.forward`."""
        batches, listed = name_batches(self._bind, args, kwargs)
        own_loss = self._model.config.pipeline.loss_fn is not None
        labelled = own_loss or all(batch.get("labels") is not None for batch in batches)
        if not (labelled and torch.is_grad_enabled() and self._model.surgery.trains):
            plain = [{k: v for k, v in batch.items() if k != MASK} for batch in batches]
            return super().__call__(plain) if listed else super().__call__(**plain[0])
        model = self._model
        model.prepare_gradients()
        for batch in batches:
            check_not_empty(batch)
        batches = model.guard(batches)
        as_tuple = batches[0].pop("return_dict", None) is False
        with model.dropout(training=model.module.training):
            loss, logits = model.run_pipeline(batches, listed=listed, grad=True)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output.to_tuple() if as_tuple else output


def name_batches(
    bind: Binder, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Batch], bool]:
    """Return the call's one batch, or the microbatches it was given as a list; and which.

    Raises:
        BatchError: If the list is empty.
    """
    if len(args) == 1 and isinstance(args[0], (list, tuple)) and not kwargs:
        if not args[0]:
            raise BatchError("The list of microbatches is empty; pass at least one dict.")
        return [bind((), dict(batch)) for batch in args[0]], True
    return [bind(args, kwargs)], False
