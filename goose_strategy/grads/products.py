"""Matrix products and lookups whose weight gradients can be computed later.

torch's node of a linear layer computes the gradients of its input, weight and bias together. These
functions compute the same numbers with the same kernels, to the last bit, but where a
`WeightGradStore` collects, the second half is left to it. Without a store, without a trainable
weight, or where no gradient is wanted, torch's own functions run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from goose_strategy.compat.torch import embedding_backward, fresh_view, inside_backward, version_of

if TYPE_CHECKING:
    from goose_strategy.grads.store import WeightGradStore

Rows = tuple[int, int]


class How(NamedTuple):
    """What a product needs beside its tensors.

    Attributes:
        store: Where gradients may be left.
        rows: See `linear`.
        transposed: Whether it is a ``Conv1D``.
        kept: Whether `_Kept` has saved the input.
        lead: The leading dimensions that the input had before it was flattened.
    """

    store: WeightGradStore
    rows: Rows | None = None
    transposed: bool = False
    kept: bool = False
    lead: tuple[int, ...] | None = None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    store: WeightGradStore | None,
    rows: Rows | None = None,
) -> Tensor:
    """Compute ``x @ weight.T + bias`` as ``F.linear`` does.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]`` or ``None``.
        store: Where the weight's and the bias's gradients may be left.
        rows: First row and number of rows to use of weight and bias; all without.

    Returns:
        ``[..., out]``; under autocast in its precision.
    """
    if store is None or not _defers(x, weight, bias):
        if rows is not None:
            weight = weight.narrow(0, *rows)
            bias = None if bias is None else bias.narrow(0, *rows)
        return functional.linear(x, weight, bias)
    x = _cast(x)
    if x.dtype is not weight.dtype:
        # Autocast keeps its cast of a weight for all that use it. Made inside of the node, without
        # a graph, it would take the gradient from others; this tiny product makes it with one.
        functional.linear(x.new_empty(0, x.shape[-1]), weight, bias)
    return _multiply(x, weight, bias, How(store, rows))


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    store: WeightGradStore | None,
    lead: tuple[int, ...] | None = None,
) -> Tensor:
    """Compute ``x @ weight + bias`` as GPT-2's ``Conv1D`` does.

    Args:
        x: ``[..., in]``.
        weight: ``[in, out]``.
        bias: ``[out]`` or ``None``.
        store: Where the weight's and the bias's gradients may be left.
        lead: The leading dimensions that ``x`` had before the caller flattened it.

    Returns:
        ``[..., out]``; under autocast in its precision.
    """
    if store is None or not _defers(x, weight, bias):
        flat = x.reshape(-1, x.shape[-1])
        product = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
        return product.view(*x.shape[:-1], -1)
    x = _cast(x)
    if x.dtype is not weight.dtype:
        x.new_empty(0, x.shape[-1]) @ weight  # See `linear`.
    return _multiply(x, weight, bias, How(store, transposed=True, lead=lead))


def embedding(
    ids: Tensor, weight: Tensor, padding: int | None, *, store: WeightGradStore | None
) -> Tensor:
    """Look up rows as ``F.embedding`` does.

    Args:
        ids: ``[...]``, int64 or int32.
        weight: ``[rows, width]``.
        padding: The id whose row gets no gradient, if there is one; not negative.
        store: Where the weight's gradient may be left.

    Returns:
        ``[..., width]``.
    """
    if store is None or not (torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf):
        return functional.embedding(ids, weight, padding)
    output: Tensor = _Embedding.apply(ids, weight, padding, store)  # type: ignore[no-untyped-call]
    return output


def _defers(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a gradient of the parameters will be wanted, and is of the kind known here."""
    if not torch.is_grad_enabled() or x.dim() < 2:
        return False
    # Parameters that were computed from others (functional_call) are left to autograd.
    if not weight.is_leaf or not (bias is None or bias.is_leaf):
        return False
    return weight.requires_grad or (bias is not None and bias.requires_grad)


def _cast(x: Tensor) -> Tensor:
    """Cast an input as autocast would, so that the cast input is what is kept."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
    if weight.requires_grad and inside_backward():
        # A checkpoint computes again, and stops at the last tensor that it had saved. torch saves
        # inputs before it multiplies; a node of ours saves behind it, one product too late.
        x = _Kept.apply(x)  # type: ignore[no-untyped-call]
        how = how._replace(kept=True)
    output: Tensor = _Product.apply(x, weight, bias, how)  # type: ignore[no-untyped-call]
    return output


class _Kept(torch.autograd.Function):
    """Identity that saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Product(torch.autograd.Function):
    """A linear layer; its node keeps the weight itself, not a copy that a checkpoint unpacks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        ctx.how, ctx.weight, ctx.bias = how, weight, bias
        ctx.shape, ctx.version = x.shape, version_of(weight)
        # Only the weight's gradient needs the input.
        _, rows, transposed, kept, _ = how
        if not kept:
            ctx.save_for_backward(x if weight.requires_grad else None)
        else:
            # Seldom needed: most checkpoints take what `_Kept` saved, and drop this graph.
            ctx.x = x.detach()
        if rows is not None:
            weight = weight.narrow(0, *rows)
            bias = None if bias is None else bias.narrow(0, *rows)
        is_flat = x.dim() == 2
        flat = x if is_flat else x.reshape(-1, x.shape[-1])
        # What torch looks at, because it decides in which order numbers are summed.
        contiguous = x.is_contiguous()
        ctx.by_column = not contiguous and flat.stride() == (1, flat.shape[0])
        ctx.fused = is_flat or contiguous
        if not transposed:
            product = functional.linear(flat, weight, bias if ctx.fused else None)
        elif bias is None:
            product = flat @ weight
        else:
            product = torch.addmm(bias, flat, weight)
        if not is_flat:
            # Not a view, into which nobody could write, and no more nodes in the graph.
            product = fresh_view(product, [*x.shape[:-1], product.shape[-1]])
        if bias is not None and not ctx.fused and not transposed:
            product += bias.to(product.dtype)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.weight
        if version_of(weight) != ctx.version:
            raise RuntimeError(
                "a weight that the gradient of its layer's input needs was modified by an in-place "
                "operation after the forward; run the backward first."
            )
        store, rows, transposed, kept, lead = ctx.how
        x = ctx.x if kept else ctx.saved_tensors[0]
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        flat = grad if grad.dim() == 2 else grad.reshape(-1, grad.shape[-1])
        grad_x: Tensor | None = None
        if needs_x:
            own = weight if rows is None else weight.narrow(0, *rows)
            own = own if own.dtype is flat.dtype else own.to(flat.dtype)
            own = own.t() if transposed else own
            grad_x = own.t().mm(flat.t()).t() if ctx.by_column else flat.mm(own)
            grad_x = grad_x.view(ctx.shape)
        owed = ProductOwed(
            weight if needs_weight else None,
            ctx.bias if needs_bias else None,
            x=x,
            grad=flat if ctx.fused or transposed else grad,
            rows=rows,
            transposed=transposed,
            lead=tuple(ctx.shape[:-1]) if lead is None else lead,
        )
        if store.active:
            store.push(owed)
            return grad_x, None, None, None
        return grad_x, *owed.compute_all(), None


class _Embedding(torch.autograd.Function):
    """``F.embedding``, whose whole backward is a weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, store: WeightGradStore
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.store = weight, padding, store
        return functional.embedding(ids, weight, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        owed = EmbeddingOwed(ctx.weight, ids=ids, grad=grad, padding=ctx.padding)
        if ctx.store.active:
            ctx.store.push(owed)
            return None, None, None, None
        return None, *owed.compute(), None, None


class ProductOwed:
    """Gradients of the weight and the bias of a linear layer.

    Args:
        weight: ``[out, in]``, or ``[in, out]`` if ``transposed``; ``None`` if it is frozen.
        bias: ``[out]``; ``None`` if there is none, or it is frozen.
        x: Input, ``[..., in]``; needed for the weight only.
        grad: Gradient of the output, ``[..., out]``, in the dimensions in which torch sums the
            bias's.
        rows: See `linear`.
        transposed: Whether it is a ``Conv1D``.
        lead: The leading dimensions of the layer's input, before anybody flattened it.
        widen: Whether 16-bit tensors give fp32 gradients, of sums that were not rounded.
    """

    __slots__ = ("bias", "grad", "lead", "rows", "transposed", "weight", "widen", "x")

    def __init__(  # noqa: PLR0913  the pieces of one layer's backward
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        x: Tensor | None,
        grad: Tensor,
        rows: Rows | None,
        transposed: bool,
        lead: tuple[int, ...],
        widen: bool = False,
    ) -> None:
        self.weight = weight
        self.widen = widen
        self.bias = bias
        # Detached, or the input would keep the graph that it came from.
        self.x = None if x is None or weight is None else x.detach()
        self.grad = grad
        self.rows = rows
        self.transposed = transposed
        self.lead = lead

    @property
    def parameters(self) -> Sequence[Tensor]:
        """See `Owed`."""
        return [param for param in (self.weight, self.bias) if param is not None]

    @property
    def held(self) -> Sequence[Tensor]:
        """See `Owed`."""
        return [self.grad] if self.x is None else [self.x, self.grad]

    def compute(self) -> Sequence[Tensor]:
        """See `Owed`."""
        return [gradient for gradient in self.compute_all() if gradient is not None]

    def compute_all(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of weight and bias, ``None`` where they are frozen."""
        grad, of_weight, of_bias = self.grad, None, None
        if self.weight is not None and self.x is not None:
            of_weight = self._whole(self._of_weight(self.x, grad, self.weight), self.weight)
        if self.bias is not None:
            dims = (0,) if grad.dim() == 2 else tuple(range(grad.dim() - 1))
            dtype = torch.promote_types(grad.dtype, torch.float32) if self.widen else None
            summed = grad.sum(dims, dtype=dtype)
            of_bias = self._whole(summed, self.bias)
        return of_weight, of_bias

    def _of_weight(self, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        if x.dim() != 2:
            x = x.reshape(-1, x.shape[-1])
        if grad.dim() != 2:
            grad = grad.reshape(-1, grad.shape[-1])
        # torch, too, chooses by how the weight lies in memory.
        times = _wide_product if self.widen else torch.mm
        if self.transposed:
            return times(x.t(), grad) if weight.is_contiguous() else times(grad.t(), x).t()
        return times(grad.t(), x) if weight.is_contiguous() else times(x.t(), grad).t()

    def _whole(self, gradient: Tensor, param: Tensor) -> Tensor:
        """Give a gradient the precision of its parameter, and zeros in the rows not used."""
        gradient = fitting(gradient, param)
        if self.rows is None:
            return gradient
        whole = torch.zeros_like(param, dtype=gradient.dtype)
        whole.narrow(0, *self.rows).copy_(gradient)
        return whole


def _wide_product(one: Tensor, other: Tensor) -> Tensor:
    """Return the product of two matrices in at least fp32; devices alone multiply 16 bits so."""
    if one.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(one, other, out_dtype=torch.float32)
    return one.mm(other)


class EmbeddingOwed:
    """The gradient of an embedding.

    Args:
        weight: ``[rows, width]``.
        ids: ``[...]``.
        grad: Gradient of what was looked up, ``[..., width]``.
        padding: See `embedding`.
    """

    __slots__ = ("grad", "ids", "padding", "weight")

    def __init__(self, weight: Tensor, *, ids: Tensor, grad: Tensor, padding: int | None) -> None:
        self.weight = weight
        self.ids = ids
        self.grad = grad
        self.padding = -1 if padding is None else padding

    @property
    def parameters(self) -> Sequence[Tensor]:
        """See `Owed`."""
        return (self.weight,)

    @property
    def held(self) -> Sequence[Tensor]:
        """See `Owed`."""
        return (self.ids, self.grad)

    def compute(self) -> Sequence[Tensor]:
        """See `Owed`."""
        rows, padding = self.weight.shape[0], self.padding
        found: Tensor = embedding_backward(self.grad, self.ids, rows=rows, padding=padding)
        return (fitting(found, self.weight),)


def fitting(gradient: Tensor, param: Tensor) -> Tensor:
    """Return a gradient in a precision in which its parameter can take it.

    Private training makes fp32 gradients of 16-bit parameters, which accumulate in fp32.
    """
    if gradient.dtype is param.dtype or gradient.dtype is param.grad_dtype:
        return gradient
    return gradient.to(param.dtype)
