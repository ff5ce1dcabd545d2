"""The language-model head: logits local to the rank for the loss, whole for everybody else.

transformers' own plan gathers the logits on every call (``colwise_gather_output``), which moves
``[batch, seq, vocab]`` once per step for a loss that needs two numbers per token. Whether a call
computes a loss is only known from its arguments, so a hook on the model reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from goose_strategy.comm.conjugate import gather_from_group
from goose_strategy.compat.peft import layers_under
from goose_strategy.compat.transformers import (
    bind_call,
    loss_function_of,
    replace_logits,
    returns_output,
)
from goose_strategy.tensor_parallel.linear import ColumnParallelLinear
from goose_strategy.tensor_parallel.loss import CausalLMLoss, VocabSlice


class HeadSwitch:
    """Makes a head give local logits in calls whose loss is a `CausalLMLoss` for them.

    A call that reaches the model's ``forward`` past its hooks gets whole logits unless it runs
    inside `local`; the loss takes both, so it is right either way.

    Args:
        *layers: The head, and what adapters add to it.
        gather_logits: Whether the output of a call with labels carries whole logits.
    """

    def __init__(self, *layers: ColumnParallelLinear, gather_logits: bool) -> None:
        self.head = layers[0]
        self._layers = layers
        self.gather_logits = gather_logits
        self._outer: list[bool] = []

    def attach(self, model: nn.Module) -> list[RemovableHandle]:
        """Hook ``model``, whose forward calls the head and the loss."""
        return [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    @contextmanager
    def local(self, wanted: bool = True) -> Iterator[None]:  # noqa: FBT001, FBT002
        """Make the head give local (or whole) logits inside the block."""
        outer = self.head.gathers_output
        self._gather(not wanted)
        try:
            yield
        finally:
            self._gather(outer)

    def _gather(self, wanted: bool) -> None:  # noqa: FBT001
        for layer in self._layers:
            layer.gathers_output = wanted

    def finish(self, output: Any) -> Any:
        """Return ``output`` with whole logits, or without any, in place of local ones.

        Collective over tp if logits were asked for.
        """
        return replace_logits(output, self._presentable)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # First of all, because the hook after the call takes it back even if this one raises.
        self._outer.append(self.head.gathers_output)
        bound = bind_call(model, args, kwargs)
        local = bound.get("labels") is not None and returns_output(model, bound)
        if local:
            loss = loss_function_of(model)
            local = isinstance(loss, CausalLMLoss) and loss.vocabulary is not None
        self._gather(not local)

    def _after(self, _model: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        self._gather(self._outer.pop())
        return self.finish(output)

    def _presentable(self, logits: Tensor) -> Tensor | None:
        cut = self.head.cut
        if cut is None or logits.shape[-1] != cut.length:
            return logits
        if not self.gather_logits:
            return None
        return gather_from_group(logits, self.head.group, dim=-1, sizes=cut.sizes)


def causal_lm_loss(
    head: nn.Module | None,
    *,
    gather_logits: bool = False,
    count: Callable[[], Tensor | float | None] | None = None,
    per_sample: Callable[[], bool] | None = None,
) -> CausalLMLoss:
    """Build the loss that fits a head.

    Args:
        head: The model's output embedding; a plain or missing one gives whole logits.
        gather_logits: Whether the output carries the logits, which must then survive the loss.
        count: See `CausalLMLoss`.
        per_sample: See `CausalLMLoss`.

    Returns:
        What to install as the model's ``loss_function``.
    """
    layers = [] if head is None else list(layers_under(head).values())
    layer = layers[0] if layers else None
    if not isinstance(layer, ColumnParallelLinear) or layer.cut is None:
        return CausalLMLoss(count=count, per_sample=per_sample)
    cut = layer.cut
    return CausalLMLoss(
        VocabSlice(layer.group, start=cut.start, length=cut.length, size=cut.total),
        reuse_logits=not gather_logits,
        count=count,
        per_sample=per_sample,
    )
