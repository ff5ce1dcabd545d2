"""Adam, Lion and SGD over a flat shard in every storage.

Each operation is rounded by itself and in this order; the compiled code does exactly the same. The
shard is worked off in slices, so no fp32 copy of it ever exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cuda_ops.layout import BLOCK, CHUNK, Main, Moment, Segments, Shard
from cuda_ops.reference.philox import random_halves
from cuda_ops.reference.roots import root32
from cuda_ops.reference.storage import encode_main, encode_moment, read_main, read_moment
from cuda_ops.state import Algorithm, Derived, StepState

_VECTOR = 8
_CPU_SLICE = 32 * CHUNK
_DEVICE_SLICE = 2048 * CHUNK


@dataclass(frozen=True)
class _Slice:
    """What the elements of a slice look up: one row per block of 64."""

    where: slice
    blocks: slice
    derived: Tensor
    active: Tensor | None
    key: Tensor
    counter: Tensor
    step: Tensor

    def column(self, name: Derived) -> Tensor:
        return self.derived[:, name, None]

    def random(self, stream: int) -> Tensor:
        return random_halves(self.key, self.counter, stream=stream, step=self.step).view(-1)


def step(shard: Shard, grad: Tensor, segments: Segments, state: StepState) -> None:
    """Step a shard in place.

    Args:
        shard: Main weights and moments, ``[n]``.
        grad: ``[n]`` fp32 or bf16.
        segments: What lies where.
        state: Prepared by ``prepare``.
    """
    on_cpu = grad.device.type == "cpu"
    if on_cpu and int(state.skip):
        return
    size = _CPU_SLICE if on_cpu else _DEVICE_SLICE
    for begin in range(0, segments.numel, size):
        end = min(begin + size, segments.numel)
        rows = _look_up(segments, state, slice(begin, end), masked=not on_cpu or segments.inactive)
        _step_slice(shard, grad[begin:end], rows, state)


def _look_up(segments: Segments, state: StepState, where: slice, *, masked: bool) -> _Slice:
    at = torch.arange(where.start, where.stop, BLOCK, device=segments.start.device)
    index = torch.searchsorted(segments.start, at, right=True) - 1
    group = segments.group[index]
    first = (segments.first[index] + at - segments.start[index]) // _VECTOR
    per_block = BLOCK // _VECTOR
    lanes = torch.arange(per_block, device=at.device)
    return _Slice(
        where=where,
        blocks=slice(where.start // BLOCK, where.stop // BLOCK),
        derived=state.derived[group.clamp(min=0)],
        active=(group >= 0) & (state.skip == 0) if masked else None,
        key=segments.key[index].repeat_interleave(per_block),
        counter=(first[:, None] + lanes).view(-1),
        step=state.step,
    )


def _step_slice(shard: Shard, grad: Tensor, rows: _Slice, state: StepState) -> None:
    p = read_main(shard, rows.where).view(-1, BLOCK)
    g = grad.to(torch.float32).view(-1, BLOCK) * (state.grad_factor * rows.column(Derived.SIGN))
    g = g + rows.column(Derived.L2) * p
    m = _read(shard.exp_avg, shard.exp_avg_scale, rows)
    v = _read(shard.exp_avg_sq, shard.exp_avg_sq_scale, rows)
    match state.algorithm:
        case Algorithm.ADAM:
            p, m, v = _adam(p, g, (_held(m), _held(v)), rows)
        case Algorithm.LION:
            p, m = _lion(p, g, _held(m), rows)
        case Algorithm.SGD:
            p, m = _sgd(p, g, m, rows)
    random = rows.random(0) if shard.main in (Main.SPLIT8, Main.BF16) else None
    weight, rest = encode_main(shard, p.reshape(-1), random)
    _put(shard.weight, weight, rows)
    _put(shard.rest, rest, rows)
    _write(shard.exp_avg, shard.exp_avg_scale, m, rows, random=None)
    stochastic = shard.second_moment in (Moment.BF16, Moment.BLOCK8)
    noise = rows.random(1) if stochastic else None
    _write(shard.exp_avg_sq, shard.exp_avg_sq_scale, v, rows, random=noise)


def _adam(
    p: Tensor, g: Tensor, moments: tuple[Tensor, Tensor], rows: _Slice
) -> tuple[Tensor, Tensor, Tensor]:
    m, v = moments
    m = m + rows.column(Derived.ONE_MINUS_BETA1) * (g - m)
    v = v * rows.column(Derived.BETA2) + rows.column(Derived.ONE_MINUS_BETA2) * (g * g)
    root = root32(v) * rows.column(Derived.INV_ROOT2) + rows.column(Derived.EPS)
    update = rows.column(Derived.STEP_SIZE) * (m / root)
    return p * rows.column(Derived.DECAY) - update, m, v


def _lion(p: Tensor, g: Tensor, m: Tensor, rows: _Slice) -> tuple[Tensor, Tensor]:
    blend = m * rows.column(Derived.BETA1) + rows.column(Derived.ONE_MINUS_BETA1) * g
    update = rows.column(Derived.STEP_SIZE) * blend.sign()
    m = m * rows.column(Derived.BETA2) + rows.column(Derived.ONE_MINUS_BETA2) * g
    return p * rows.column(Derived.DECAY) - update, m


def _sgd(p: Tensor, g: Tensor, m: Tensor | None, rows: _Slice) -> tuple[Tensor, Tensor | None]:
    direction = g
    if m is not None:
        momentum = rows.column(Derived.BETA1)
        m = m * momentum + rows.column(Derived.ONE_MINUS_BETA2) * g
        direction = torch.where(rows.column(Derived.NESTEROV) != 0, g + momentum * m, m)
    return p * rows.column(Derived.DECAY) - rows.column(Derived.STEP_SIZE) * direction, m


def _held(moment: Tensor | None) -> Tensor:
    if moment is None:
        raise ValueError("the algorithm needs a moment that the shard does not have")
    return moment


def _read(values: Tensor | None, scales: Tensor | None, rows: _Slice) -> Tensor | None:
    if values is None:
        return None
    return read_moment(values[rows.where], None if scales is None else scales[rows.blocks]).view(
        -1, BLOCK
    )


def _write(
    values: Tensor | None,
    scales: Tensor | None,
    new: Tensor | None,
    rows: _Slice,
    *,
    random: Tensor | None,
) -> None:
    if values is None or new is None:
        return
    codes, new_scales = encode_moment(new.reshape(-1), values, random=random)
    _put(values, codes, rows)
    if scales is not None and new_scales is not None:
        kept = scales[rows.blocks]
        active = rows.active
        kept.copy_(new_scales if active is None else torch.where(active, new_scales, kept))


def _put(target: Tensor | None, new: Tensor | None, rows: _Slice) -> None:
    if target is None or new is None:
        return
    kept = target[rows.where]
    if rows.active is None:
        kept.copy_(new)
        return
    if kept.dtype == torch.float8_e4m3fn:
        kept, new = kept.view(torch.uint8), new.view(torch.uint8)
    kept = kept.view(-1, BLOCK)
    kept.copy_(torch.where(rows.active[:, None], new.view(-1, BLOCK), kept))
