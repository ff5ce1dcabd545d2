"""GPT-2's ``Conv1D``, a linear layer that keeps its weight transposed, cut over tp.

It lives in transformers, which this package imports only where the program has; the classes are
therefore made when the first such layer is cut. See `linear` for the mathematics.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.grads.products import conv1d
from goose_strategy.tensor_parallel.convert import Converted
from goose_strategy.tensor_parallel.regions import enter_island, leave_island

if TYPE_CHECKING:
    from goose_strategy.tensor_parallel.slicing import Cut, Slicer


class _Column(Converted):
    """Output features cut: ``y[..., nf / tp] = x @ weight[nx, nf / tp] + bias[nf / tp]``.

    Attributes:
        group: Ranks that hold the other slices.
        cut: Which output features this rank holds.
        copies_input: See `ColumnParallelLinear`.
    """

    weight: Tensor
    bias: Tensor
    defers: ClassVar[bool] = True
    group: ProcessGroup | None = None
    cut: Cut | None = None
    copies_input: bool = True

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's output features ``[..., nf / tp]`` from ``x``, ``[..., nx]``."""
        entered = enter_island(x, self.group) if self.copies_input else x
        return conv1d(entered, self.weight, self.bias, store=self.weight_gradients)


class _Row(Converted):
    """Input features cut: ``y = sum over tp of x[..., nx / tp] @ weight[nx / tp, nf], + bias``.

    Attributes:
        group: Ranks that hold the other slices.
        cut: Which input features this rank holds.
    """

    weight: Tensor
    bias: Tensor
    defers: ClassVar[bool] = True
    group: ProcessGroup | None = None
    cut: Cut | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Compute the whole output ``[..., nf]`` from this rank's slice of the input."""
        flat = x.reshape(-1, x.shape[-1])
        product = conv1d(flat, self.weight, None, store=self.weight_gradients)
        summed = leave_island(product, self.group)
        return summed.add_(self.bias.to(summed.dtype)).view(*x.shape[:-1], -1)


@functools.cache
def conv1d_classes(plain: Any) -> tuple[type[Converted], type[Converted]]:
    """Return the column- and row-parallel classes of transformers' ``Conv1D``."""
    column = type("ColumnParallelConv1D", (_Column, plain), {"plain": plain})
    row = type("RowParallelConv1D", (_Row, plain), {"plain": plain})
    return column, row


def convert_column(
    module: Any,
    slicer: Slicer,
    group: ProcessGroup | None,
    *,
    copies_input: bool,
    packed: tuple[int, ...] = (),
) -> Converted:
    """Cut the output features of a ``Conv1D`` in place; return the same object."""
    plain: Any = type(module)
    column, _ = conv1d_classes(plain)
    cut = slicer.cut(module.weight, 1, packed=packed)
    slicer.cut(module.bias, 0, packed=packed)
    return column.adopt(module, group=group, cut=cut, copies_input=copies_input)


def convert_row(module: Any, slicer: Slicer, group: ProcessGroup | None) -> Converted:
    """Cut the input features of a ``Conv1D`` in place; return the same object."""
    plain: Any = type(module)
    _, row = conv1d_classes(plain)
    return row.adopt(module, group=group, cut=slicer.cut(module.weight, 0))
