"""fp32 values in and out of every kind of storage, for whole shards or a slice of one."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops.layout import BLOCK, Main, Moment, Shard, moment_kind
from cuda_ops.reference.blocks import decode_first, decode_second, encode_first, encode_second
from cuda_ops.reference.rounding import (
    join8,
    join16,
    nearest_bf16,
    split8,
    split16,
    stochastic_bf16,
)


def read_main(shard: Shard, where: slice) -> Tensor:
    """Return the main weights of a slice as fp32; a copy but for ``Main.FP32``."""
    weight, rest = shard.weight, shard.rest
    if shard.main == Main.FP32 and rest is not None:
        return rest[where]
    if weight is None:
        raise ValueError(f"main={shard.main.value} needs the bf16 weights")
    if rest is None:
        return weight[where].to(torch.float32)
    join = join16 if shard.main == Main.SPLIT16 else join8
    return join(weight[where], rest[where])


def encode_main(
    shard: Shard, values: Tensor, random: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return what ``weight`` and ``rest`` have to hold for fp32 main weights.

    Args:
        shard: Says which storage.
        values: ``[k]`` fp32.
        random: ``[k]`` int32 in ``[0, 65536)`` for the stochastic kinds; ``None``: to nearest.
    """
    match shard.main:
        case Main.FP32:
            return (None if shard.weight is None else nearest_bf16(values)), values
        case Main.SPLIT16:
            return split16(values)
        case Main.SPLIT8:
            return split8(values, random)
        case Main.BF16:
            rounded = nearest_bf16(values) if random is None else stochastic_bf16(values, random)
            return rounded, None


def read_moment(values: Tensor, scales: Tensor | None) -> Tensor:
    """Return ``[k]`` fp32 from the storage of a moment (or a slice of it)."""
    if scales is None:
        return values.to(torch.float32)
    decode = decode_second if values.dtype == torch.uint8 else decode_first
    return decode(values, scales).view(-1)


def encode_moment(
    values: Tensor, like: Tensor, *, random: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return codes and scales of a moment.

    Args:
        values: ``[k]`` fp32.
        like: The storage, whose type says how to encode.
        random: ``[k]`` int32 for a second moment; ``None`` rounds to nearest.
    """
    if like.dtype == torch.uint8:
        noise = None if random is None else random.view(-1, BLOCK)
        codes, scales = encode_second(values.view(-1, BLOCK), noise)
        return codes.view(-1), scales
    match moment_kind(like):
        case Moment.BLOCK8:
            codes, scales = encode_first(values.view(-1, BLOCK))
            return codes.view(-1), scales
        case Moment.BF16:
            return (
                nearest_bf16(values) if random is None else stochastic_bf16(values, random)
            ), None
        case _:
            return values, None


def split_main(shard: Shard, values: Tensor) -> None:
    """Write ``[n]`` fp32 main weights into the shard, to nearest."""
    weight, rest = encode_main(shard, values, None)
    if shard.weight is not None and weight is not None:
        shard.weight.copy_(weight)
    if shard.rest is not None and rest is not None:
        shard.rest.copy_(rest)


def join_main(shard: Shard, out: Tensor) -> None:
    """Write the ``[n]`` main weights into ``out``, fp32."""
    out.copy_(read_main(shard, slice(None)))


def write_moment(x: Tensor, values: Tensor, scales: Tensor | None) -> None:
    """Write ``[n]`` fp32 into the storage of a moment, to nearest."""
    codes, new_scales = encode_moment(x, values, random=None)
    values.copy_(codes)
    if scales is not None and new_scales is not None:
        scales.copy_(new_scales)
