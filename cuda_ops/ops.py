"""The calls of this package: checked arguments, then the fastest implementation that is there.

Every call takes tensors of one device, changes them in place and never waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cuda_ops.layout import BLOCK, Segments, Shard, chunks_of
from cuda_ops.load import library_for
from cuda_ops.reference.calls import Reference
from cuda_ops.state import Algorithm, StepState

if TYPE_CHECKING:
    from cuda_ops.bindings import Library

_GRADIENTS = (torch.float32, torch.bfloat16)
_REFERENCE = Reference()


def sum_of_squares(grad: Tensor, segments: Segments, *, out: Tensor) -> None:
    """Write the weighted sum of squares of every chunk of 2048 elements.

    Args:
        grad: ``[n]`` fp32 or bf16.
        segments: Says what each element counts.
        out: ``[chunks_of(n)]`` fp64. Not finite where any gradient of the chunk is not, or where a
            sum of eight squares is beyond fp32 (gradients of 1e19).

    Raises:
        ValueError: If types or sizes do not fit.
    """
    _check("grad", grad, _GRADIENTS, (segments.numel,))
    _check("out", out, (torch.float64,), (chunks_of(segments.numel),))
    _of(grad).sum_of_squares(grad, segments, out)


def reduce_partials(partials: Tensor, *, out: Tensor) -> None:
    """Add partial sums in a fixed tree.

    Args:
        partials: ``[c]`` fp64, any number.
        out: ``[1]`` fp64.

    Raises:
        ValueError: If types or sizes do not fit.
    """
    _check("partials", partials, (torch.float64,), (partials.numel(),))
    _check("out", out, (torch.float64,), (1,))
    _of(out).reduce_partials(partials, out)


def prepare(
    state: StepState, norm2: Tensor, *, max_norm: float = 0.0, scale: Tensor | None = None
) -> None:
    """Decide whether the next step is taken, and with which factors.

    Args:
        state: Changed in place: counters, powers, ``derived``, scalars.
        norm2: ``[1]`` fp64, squared norm of the unscaled gradients, the same on all ranks.
        max_norm: Clip the scaled gradients to this norm; 0 does not clip.
        scale: ``[1]`` fp32, multiplied into gradients and norm.

    Raises:
        ValueError: If types or sizes do not fit, or ``max_norm`` is negative or NaN.
    """
    _check("norm2", norm2, (torch.float64,), (1,))
    if scale is not None:
        _check("scale", scale, (torch.float32,), (1,))
    if not max_norm >= 0:
        raise ValueError(f"max_norm={max_norm}: a positive norm, or 0 for no clipping")
    _of(norm2).prepare(state, norm2, max_norm, scale)


def step(shard: Shard, grad: Tensor, *, segments: Segments, state: StepState) -> None:
    """Step one shard with the decision and the factors of ``prepare``.

    Args:
        shard: Changed in place.
        grad: ``[n]`` fp32 or bf16, as it was in the norm; the factors are applied here.
        segments: What lies where.
        state: The optimizer's state.

    Raises:
        ValueError: If types or sizes do not fit, or the algorithm needs moments that are missing.
    """
    _check("grad", grad, _GRADIENTS, (segments.numel,))
    if shard.numel != segments.numel:
        raise ValueError(f"a shard of {shard.numel} elements, segments of {segments.numel}")
    _check_moments(shard, state.algorithm)
    _of(grad).step(shard, grad, segments, state)


def split_main(shard: Shard, values: Tensor) -> None:
    """Write fp32 main weights into the storage of a shard, rounded to nearest.

    Args:
        shard: Changed in place.
        values: ``[n]`` fp32.

    Raises:
        ValueError: If types or sizes do not fit.
    """
    _check("values", values, (torch.float32,), (shard.numel,))
    _of(values).split_main(shard, values)


def join_main(shard: Shard, *, out: Tensor | None = None) -> Tensor:
    """Return the main weights of a shard.

    Args:
        shard: Read only.
        out: ``[n]`` fp32 to write into; a new tensor by default.

    Raises:
        ValueError: If types or sizes do not fit.
    """
    if out is None:
        out = torch.empty(shard.numel, dtype=torch.float32, device=shard.device)
    _check("out", out, (torch.float32,), (shard.numel,))
    _of(out).join_main(shard, out)
    return out


def write_moment(x: Tensor, values: Tensor, scales: Tensor | None = None) -> None:
    """Write fp32 values into the storage of a moment, rounded to nearest.

    Args:
        x: ``[n]`` fp32.
        values: ``[n]`` as in ``Shard``.
        scales: ``[n / 64]`` for 8-bit storage.

    Raises:
        ValueError: If types or sizes do not fit.
    """
    _check("x", x, (torch.float32,), (values.numel(),))
    _check_scales(values, scales)
    _of(x).write_moment(x, values, scales)


def read_moment(
    values: Tensor, scales: Tensor | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Return the fp32 values of a moment.

    Args:
        values: ``[n]`` as in ``Shard``.
        scales: ``[n / 64]`` for 8-bit storage.
        out: ``[n]`` fp32 to write into; a new tensor by default.

    Raises:
        ValueError: If types or sizes do not fit.
    """
    _check_scales(values, scales)
    if out is None:
        out = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
    _check("out", out, (torch.float32,), (values.numel(),))
    _of(out).read_moment(values, scales, out)
    return out


def unpack(
    received: Tensor, *, out: Tensor, scale: Tensor | None, segments: Segments, partials: Tensor
) -> None:
    """Add over dp what an all-to-all brought, in fp32, and take the sums of squares of the result.

    Args:
        received: ``[dp, n]`` bf16.
        out: ``[n]`` fp32 or bf16: ``scale`` times the sum over dp, in rank order.
        scale: ``[1]`` fp32, or ``None`` for 1.
        segments: What lies where.
        partials: ``[chunks_of(n)]`` fp64.

    Raises:
        ValueError: If types or sizes do not fit.
    """
    n = segments.numel
    if received.dim() != 2 or not received.shape[0]:
        raise ValueError(f"received has shape {tuple(received.shape)}; (dp, {n}) is needed")
    _check("received", received, (torch.bfloat16,), (received.shape[0], n))
    _check("out", out, _GRADIENTS, (n,))
    _check("partials", partials, (torch.float64,), (chunks_of(n),))
    if scale is not None:
        _check("scale", scale, (torch.float32,), (1,))
    _of(out).unpack(received, out, scale, segments, partials)


def _of(tensor: Tensor) -> Library | Reference:
    return library_for(tensor.device) or _REFERENCE


def _check(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}; allowed: {dtypes}")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {shape} is needed, dense")


def _check_scales(values: Tensor, scales: Tensor | None) -> None:
    wanted = {torch.float8_e4m3fn: torch.bfloat16, torch.uint8: torch.float32}.get(values.dtype)
    if wanted is None and scales is None:
        return
    if wanted is None or scales is None:
        raise ValueError(f"a moment of {values.dtype} with scales={scales is not None}")
    _check("scales", scales, (wanted,), (values.numel() // BLOCK,))


def _check_moments(shard: Shard, algorithm: Algorithm) -> None:
    first, second = shard.exp_avg is not None, shard.exp_avg_sq is not None
    if second != (algorithm == Algorithm.ADAM) or not (first or algorithm == Algorithm.SGD):
        raise ValueError(
            f"algorithm={algorithm.name} with exp_avg={shard.first_moment.value} and "
            f"exp_avg_sq={shard.second_moment.value}: ADAM needs both, LION and SGD the first only"
        )
