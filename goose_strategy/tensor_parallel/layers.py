"""One plain layer and the parallel class that its style gives it.

The same layer may stand in the model by itself or under adapters; it is checked, measured and
converted here for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed import ProcessGroup

from goose_strategy.compat.transformers import is_conv1d
from goose_strategy.tensor_parallel.conv1d import convert_column, convert_row
from goose_strategy.tensor_parallel.embedding import VocabParallelEmbedding
from goose_strategy.tensor_parallel.experts import expert_dims
from goose_strategy.tensor_parallel.linear import (
    ColumnParallelLinear,
    KeyValueLinear,
    RowParallelLinear,
)
from goose_strategy.tensor_parallel.plan import Style

if TYPE_CHECKING:
    from goose_strategy.tensor_parallel.convert import Converted
    from goose_strategy.tensor_parallel.slicing import Slicer

# By style: the class for linear layers and embeddings, and the dimension of each parameter it cuts.
_CLASSES: dict[Style, type[Converted]] = {
    Style.COLUMN: ColumnParallelLinear,
    Style.GATHERED: ColumnParallelLinear,
    Style.HEAD: ColumnParallelLinear,
    Style.KEY_VALUE: KeyValueLinear,
    Style.ROW: RowParallelLinear,
    Style.SPLIT: RowParallelLinear,
    Style.VOCAB: VocabParallelEmbedding,
}
_CUT_DIMS: dict[Style, dict[str, int]] = {
    Style.COLUMN: {"weight": 0, "bias": 0},
    Style.GATHERED: {"weight": 0, "bias": 0},
    Style.HEAD: {"weight": 0, "bias": 0},
    Style.ROW: {"weight": 1},
    Style.SPLIT: {"weight": 1},
    Style.VOCAB: {"weight": 0},
}
# ``Conv1D`` keeps its weight transposed.
_CONV1D_DIMS: dict[Style, dict[str, int]] = {
    Style.COLUMN: {"weight": 1, "bias": 0},
    Style.ROW: {"weight": 0},
}

CUT = frozenset({*_CLASSES, Style.EXPERTS})
"""Styles that change a module."""


@dataclass(frozen=True)
class HowCut:
    """How one layer is cut.

    Args:
        style: Its style.
        copies_input: See `ColumnParallelLinear`.
        packed: Widths of the matrices side by side that a column layer is made of; see `Cut`.
        kv_heads: Key or value heads of a layer with `Style.KEY_VALUE`.
    """

    style: Style
    copies_input: bool = True
    packed: tuple[int, ...] = ()
    kv_heads: int = 1


def check_layer(name: str, layer: nn.Module, style: Style) -> None:
    """Check that a layer is of the class that its style cuts.

    Raises:
        PlanError: If it is not.
    """
    if not (is_conv1d(layer) and style in _CONV1D_DIMS):
        _CLASSES[style].check(name, layer)


def cut_dims(layer: nn.Module, style: Style) -> Mapping[str, int]:
    """Return the dimension along which each of a layer's parameters is cut; others stay whole."""
    if style is Style.EXPERTS:
        return expert_dims(layer)
    dims = _CONV1D_DIMS if is_conv1d(layer) else _CUT_DIMS
    return dims.get(style, {})


def convert_layer(layer: Any, how: HowCut, slicer: Slicer, group: ProcessGroup) -> Converted:
    """Cut a layer in place; return the same object.

    Args:
        layer: What `check_layer` accepts.
        how: How it is cut.
        slicer: Cuts the parameters.
        group: The tensor-parallel group.
    """
    style, copies, packed = how.style, how.copies_input, how.packed
    if style is Style.COLUMN and is_conv1d(layer):
        return convert_column(layer, slicer, group, copies_input=copies, packed=packed)
    if style is Style.ROW and is_conv1d(layer):
        return convert_row(layer, slicer, group)
    if style in (Style.ROW, Style.SPLIT):
        is_split = style is Style.SPLIT
        return RowParallelLinear.convert(layer, slicer, group, splits_input=is_split)
    if style is Style.KEY_VALUE:
        return KeyValueLinear.convert(layer, group, heads=how.kv_heads, copies_input=copies)
    if style is Style.VOCAB:
        return VocabParallelEmbedding.convert(layer, slicer, group)
    return ColumnParallelLinear.convert(
        layer,
        slicer,
        group,
        copies_input=copies,
        gathers_output=style in (Style.HEAD, Style.GATHERED),
        packed=packed,
    )
