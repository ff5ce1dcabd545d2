"""Low-rank adapters on layers that are cut over tp.

peft can follow transformers' DTensors, but leaves the gradients of the replicated factor unsummed.
Here peft's own layers and their ``forward`` stay; what they call is cut like the layer below them:

    column   y[out / tp] = x W + s (x A) B      A whole, its gradient a share;  B cut as W is
    row      y = sum of x[in / tp] W + s (sum of x[in / tp] A) B      A cut as W is;  B whole
    vocab    A's columns, the vocabulary, cut as the embedding's rows;  B whole

``A`` of a column layer meets this rank's rows of ``B`` only, so its gradient has to be summed over
tp (Hu et al. 2021, arXiv:2106.09685, for the adapters themselves).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from goose_strategy.compat import peft
from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.convert import Converted
from goose_strategy.tensor_parallel.embedding import look_up
from goose_strategy.tensor_parallel.layers import HowCut, convert_layer
from goose_strategy.tensor_parallel.linear import ColumnParallelLinear
from goose_strategy.tensor_parallel.plan import Style
from goose_strategy.tensor_parallel.regions import enter_island

if TYPE_CHECKING:
    from goose_strategy.tensor_parallel.slicing import Cut, Slicer

_COLUMNS = (Style.COLUMN, Style.GATHERED, Style.HEAD, Style.KEY_VALUE)
_ADVICE = (
    "Low-rank adapters (LoraConfig without variants) on linear layers and embeddings can be cut; "
    "use them, or tp=1."
)


@dataclass
class Adapted:
    """What `cut_adapters` did to one layer.

    Attributes:
        converted: Modules that have another class now.
        handles: Hooks.
        shares: Whole parameters of whose gradient each rank sees a share.
    """

    converted: list[Converted] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)


class _SlicedDropout(Converted, nn.Dropout):
    """Dropout of a slice of the features, with the mask that one process would draw.

    All tp ranks have the same random state. They draw the mask of the whole layer and keep the
    slice of theirs: different features are dropped independently, and the state stays the same.

    Attributes:
        cut: Which features this rank has.
    """

    plain: ClassVar[type[nn.Module]] = nn.Dropout
    cut: Cut | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Drop features of ``input``, ``[..., features / tp]``."""
        cut = self.cut
        if cut is None or not self.training:
            return super().forward(input)
        with torch.no_grad():
            ones = input.new_ones(()).expand(*input.shape[:-1], cut.total)
            mask = functional.dropout(ones, self.p)
        last = [mask.narrow(-1, start, length) for start, length in cut.runs]
        return input * (last[0] if len(last) == 1 else torch.cat(last, -1))


class _VocabLora(Converted):
    """An embedding with adapters whose ``A``, ``[r, vocab / tp]``, is cut.

    Attributes:
        group: Ranks that hold the other columns.
        cut: Which columns this rank holds.
    """

    group: ProcessGroup | None = None
    cut: Cut | None = None


@functools.cache
def _embedding_class(plain: Any) -> type[Converted]:
    def local(layer: Any, ids: Tensor, table: Tensor) -> Tensor:
        return look_up(ids, table, layer.cut, layer.group, padding=layer.base_layer.padding_idx)

    return type(
        "VocabParallelLora", (_VocabLora, plain), {"plain": plain, **peft.replaced_lookup(local)}
    )


def check_adapters(name: str, module: nn.Module, *, is_cut: bool) -> None:
    """Check that a module of peft computes what is known here; any other module passes.

    Args:
        name: Name of the module, for messages.
        module: Any module.
        is_cut: Whether tp cuts it.

    Raises:
        PlanError: If it is another kind of adapter, a variant of LoRA, or merged.
    """
    if peft.is_other_adapter(module):
        raise PlanError(
            f"{name}={type(module).__name__} (peft) cannot be trained with tp > 1. {_ADVICE}",
            axis="tp",
        )
    if peft.is_saved_copy(module) and any(
        next(layer.children(), None) is not None for layer in peft.layers_under(module).values()
    ):
        raise PlanError(
            f"{name} is in modules_to_save and holds other modules, which tp > 1 cannot find "
            f"there; name its layers instead, or use tp=1.",
            axis="tp",
        )
    if not peft.is_lora(module):
        return
    if obstacle := peft.obstacle_of(module):
        raise PlanError(f"{name}: {obstacle}. {_ADVICE}", axis="tp")
    if is_cut and "forward" in vars(module):
        raise PlanError(
            f"{name}.forward was replaced on the instance, so cutting the layer would have no "
            f"effect; remove the patch before the set-up.",
            axis="tp",
        )


def cut_adapters(module: nn.Module, how: HowCut, slicer: Slicer, group: ProcessGroup) -> Adapted:
    """Cut the adapters of one layer in place; its base layer is cut by the caller.

    Args:
        module: A layer with adapters.
        how: How the base layer is cut.
        slicer: Cuts the parameters.
        group: The tensor-parallel group.

    Returns:
        What was done.
    """
    done = Adapted()
    inner = replace(how, copies_input=False)
    if how.style is Style.VOCAB:
        _cut_embedding(module, slicer, group, done)
        return done
    for a, b in peft.linear_adapters(module).values():
        if how.style in (Style.ROW, Style.SPLIT):
            done.converted.append(convert_layer(a, inner, slicer, group))
            continue
        done.shares.append(a.weight)
        done.converted.append(convert_layer(b, inner, slicer, group))
    if how.style is Style.ROW:
        _slice_dropouts(module, slicer, done)
    return done


def enters_alone(module: nn.Module, style: Style, group: ProcessGroup) -> RemovableHandle | None:
    """Let a column layer outside of an island sum its input's gradient, adapters included.

    Returns:
        The hook; ``None`` if the layer has no adapters or is no column layer.
    """
    if not peft.is_lora(module) or style not in _COLUMNS:
        return None

    def enter(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (enter_island(args[0], group), *args[1:])

    return module.register_forward_pre_hook(enter)


def _slice_dropouts(module: nn.Module, slicer: Slicer, done: Adapted) -> None:
    first, _ = next(iter(peft.linear_adapters(module).values()))
    cut = slicer.get(first.weight)
    for dropout in peft.adapter_dropouts(module):
        if type(dropout) is nn.Dropout:
            done.converted.append(_SlicedDropout.adopt(dropout, cut=cut))


def _cut_embedding(module: nn.Module, slicer: Slicer, group: ProcessGroup, done: Adapted) -> None:
    cuts = [slicer.cut(a, 1) for a, _ in peft.embedding_adapters(module).values()]
    if cuts:
        plain: Any = type(module)
        own = _embedding_class(plain)
        done.converted.append(own.adopt(module, group=group, cut=cuts[0]))


def head_layers(module: nn.Module) -> list[ColumnParallelLinear]:
    """Return the cut layers whose outputs make up the logits of a head, adapters included."""
    under = list(peft.layers_under(module).values())
    if peft.is_lora(module):
        under += [b for _, b in peft.linear_adapters(module).values()]
    return [layer for layer in under if isinstance(layer, ColumnParallelLinear)]
