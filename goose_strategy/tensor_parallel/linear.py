"""Linear layers whose weight is cut over the tensor-parallel ranks.

DTensor gives the same mathematics through dispatch of every operation, which more than doubles the
CPU time of a small layer; here a layer is ``F.linear`` on local tensors and at most one collective
(Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from goose_strategy.comm.conjugate import gather_from_group, split_to_group
from goose_strategy.grads.products import linear
from goose_strategy.tensor_parallel.convert import Converted
from goose_strategy.tensor_parallel.regions import enter_island, leave_island

if TYPE_CHECKING:
    from goose_strategy.tensor_parallel.slicing import Cut, Slicer


class ColumnParallelLinear(Converted, nn.Linear):
    """Output features cut: ``y[..., out / tp] = x @ weight[out / tp, in].T + bias[out / tp]``.

    ``in_features`` and ``out_features`` stay those of the whole layer. Made by `convert`; built
    directly it is a plain `torch.nn.Linear`.

    Attributes:
        group: Ranks that hold the other slices.
        cut: Which output features this rank holds.
        copies_input: Whether the layer sums its input's gradient itself; ``False`` inside an
            island, whose entry does it for all column layers together.
        gathers_output: Whether the output is ``[..., out]`` on every rank.
    """

    plain: ClassVar[type[nn.Module]] = nn.Linear
    defers: ClassVar[bool] = True
    group: ProcessGroup | None = None
    cut: Cut | None = None
    copies_input: bool = True
    gathers_output: bool = False

    @classmethod
    def convert(
        cls,
        linear: nn.Linear,
        slicer: Slicer,
        group: ProcessGroup | None,
        *,
        copies_input: bool = True,
        gathers_output: bool = False,
        packed: tuple[int, ...] = (),
    ) -> ColumnParallelLinear:
        """Cut ``linear`` in place.

        Args:
            linear: A plain layer, equal on all ranks.
            slicer: Cuts the parameters.
            group: The tensor-parallel group.
            copies_input: See the class.
            gathers_output: See the class.
            packed: Widths of the matrices side by side that the layer is made of; see `Cut`.

        Returns:
            The same object.
        """
        cut = slicer.cut(linear.weight, 0, packed=packed)
        bias: Tensor | None = linear.bias
        if bias is not None:
            slicer.cut(bias, 0, packed=packed)
        return cls.adopt(
            linear, group=group, cut=cut, copies_input=copies_input, gathers_output=gathers_output
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute this rank's output features.

        Args:
            input: ``[..., in]``, equal on all ranks.

        Returns:
            ``[..., out / tp]``, or ``[..., out]`` if the output is gathered.
        """
        entered = enter_island(input, self.group) if self.copies_input else input
        output = linear(entered, self.weight, self.bias, store=self.weight_gradients)
        if self.gathers_output and self.cut is not None:
            output = gather_from_group(output, self.group, dim=-1, sizes=self.cut.sizes)
        return output

    def extra_repr(self) -> str:
        """Add this rank's slice to the layer's description."""
        return f"{super().extra_repr()}, {_slice_of('out_features', self.cut)}"


class KeyValueLinear(Converted, nn.Linear):
    """Fewer heads than ranks: the whole layer on every rank, which computes one head of it.

    The gradients of the weight and the input are this rank's share of them. Made by `convert`.

    Attributes:
        group: Ranks that hold the query heads.
        first: First output feature of this rank's head.
        width: Output features of one head.
        copies_input: See `ColumnParallelLinear`.
    """

    plain: ClassVar[type[nn.Module]] = nn.Linear
    defers: ClassVar[bool] = True
    group: ProcessGroup | None = None
    first: int = 0
    width: int = 0
    copies_input: bool = True

    @classmethod
    def convert(
        cls,
        linear: nn.Linear,
        group: ProcessGroup,
        *,
        heads: int,
        copies_input: bool = True,
    ) -> KeyValueLinear:
        """Let ``linear`` compute the head that this rank's queries use, in place.

        Args:
            linear: A plain layer of ``heads`` heads, equal on all ranks.
            group: The tensor-parallel group; its size is a multiple of ``heads``.
            heads: Key or value heads of the whole model.
            copies_input: See the class.

        Returns:
            The same object.
        """
        width = linear.out_features // heads
        head = group.rank() // (group.size() // heads)
        return cls.adopt(
            linear, group=group, first=head * width, width=width, copies_input=copies_input
        )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute one head.

        Args:
            input: ``[..., in]``, equal on all ranks.

        Returns:
            ``[..., out / heads]``.
        """
        entered = enter_island(input, self.group) if self.copies_input else input
        rows = (self.first, self.width)
        return linear(entered, self.weight, self.bias, store=self.weight_gradients, rows=rows)

    def extra_repr(self) -> str:
        """Add this rank's head to the layer's description."""
        return f"{super().extra_repr()}, out_features of this rank={self.first}:+{self.width}"


class RowParallelLinear(Converted, nn.Linear):
    """Input features cut: ``y = sum over tp of x[..., in / tp] @ weight[out, in / tp].T, + bias``.

    The bias is whole on every rank and added once, after the sum. Made by `convert`; built
    directly it is a plain `torch.nn.Linear`.

    Attributes:
        group: Ranks that hold the other slices.
        cut: Which input features this rank holds.
        splits_input: Whether the input is ``[..., in]`` on every rank.
    """

    plain: ClassVar[type[nn.Module]] = nn.Linear
    defers: ClassVar[bool] = True
    group: ProcessGroup | None = None
    cut: Cut | None = None
    splits_input: bool = False

    @classmethod
    def convert(
        cls,
        linear: nn.Linear,
        slicer: Slicer,
        group: ProcessGroup | None,
        *,
        splits_input: bool = False,
    ) -> RowParallelLinear:
        """Cut ``linear`` in place.

        Args:
            linear: A plain layer, equal on all ranks.
            slicer: Cuts the weight.
            group: The tensor-parallel group.
            splits_input: See the class.

        Returns:
            The same object.
        """
        cut = slicer.cut(linear.weight, 1)
        return cls.adopt(linear, group=group, cut=cut, splits_input=splits_input)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Compute the whole output from every rank's input features.

        Args:
            input: ``[..., in / tp]``, this rank's slice; or ``[..., in]`` if it is split here.

        Returns:
            ``[..., out]``, equal on all ranks.
        """
        own = input
        if self.splits_input and self.cut is not None:
            own = split_to_group(input, self.group, dim=-1, sizes=self.cut.sizes)
        product = linear(own, self.weight, store=self.weight_gradients)
        output = leave_island(product, self.group)
        bias: Tensor | None = self.bias
        # Under autocast the bias has the layer's precision, not that of its parameter.
        return output if bias is None else output.add_(bias.to(output.dtype))

    def extra_repr(self) -> str:
        """Add this rank's slice to the layer's description."""
        return f"{super().extra_repr()}, {_slice_of('in_features', self.cut)}"


def _slice_of(name: str, cut: Cut | None) -> str:
    runs = "+".join(f"{start}:{start + length}" for start, length in cut.runs) if cut else ""
    return f"{name} of this rank={runs}" if cut else "not cut"
