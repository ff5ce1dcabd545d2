"""Whether a card runs the library's kernels where torch puts them: streams and CUDA graphs.

The library has a CUDA runtime of its own inside, torch another. A stream is one handle for both
only because both stand on one driver and one context; a kernel that ran on another stream would
read gradients that are not there yet. So the gradients are late here, on every kind of stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cuda_ops.bench.cases import TENSORS, Variant, equal_bits, gradients
from cuda_ops.bench.place import Place, prepared
from cuda_ops.layout import CHUNK, Main, Moment, Segments, Shard, chunks_of
from cuda_ops.state import Algorithm, StepState

_VARIANT = Variant(Algorithm.ADAM, Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, torch.bfloat16)
_STEPS = 5
_BUSY = 4096


def check_streams(place: Place) -> tuple[list[str], bool]:
    """Step with late gradients on every kind of stream, and read the weights on it at once.

    Returns:
        A line for each kind of stream, and whether the bits of any were others.
    """
    small = replace(place, numel=64 * CHUNK)
    grads = [grad.to(place.device) for grad in gradients(_VARIANT, _STEPS, small.numel)[2:]]
    plain = prepared(small, _VARIANT)
    for grad in grads:
        _whole_step(small, grad, *plain)
    wanted = _tensors(plain[0])
    lines, bad = [], False
    for name, handle, stream in _streams(place):
        if not place.dry:
            torch.cuda.synchronize(place.device)
        with stream:
            found, waited = _late(small, grads)
        if not place.dry:
            torch.cuda.synchronize(place.device)
        same = all(equal_bits(a.cpu(), b) for a, b in zip(found, wanted, strict=True))
        bad |= not same
        bits = "the same bits" if same else "OTHER BITS"
        lines.append(f"{name} ({handle}): {bits}{', but the host waited' if waited else ''}")
    return lines, bad


def _streams(place: Place) -> list[tuple[str, str, AbstractContextManager[Any]]]:
    """Return name, handle and context of each kind of stream."""
    if place.dry:
        return [("no stream", "dry run", nullcontext())]
    device = place.device
    made = {
        "torch's default stream": torch.cuda.default_stream(device),
        "a side stream": torch.cuda.Stream(device),
        "a stream of high priority": torch.cuda.Stream(device, priority=-1),
        "an external stream": torch.cuda.ExternalStream(
            torch.cuda.Stream(device).cuda_stream, device=device
        ),
    }
    return [(name, f"{s.cuda_stream:#x}", torch.cuda.stream(s)) for name, s in made.items()]


def _late(place: Place, grads: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """Step with gradients that are still being computed.

    Returns:
        Copies of the shard's tensors, made on the same stream right behind the last step; and
        whether the host waited for the device meanwhile.
    """
    shard, segments, state = prepared(place, _VARIANT)
    late = torch.zeros_like(grads[0])
    size = 64 if place.dry else _BUSY
    busy = torch.ones(size, size, device=place.device)
    for grad in grads:
        late.zero_()
        for _ in range(8):
            busy = (busy @ busy).clamp(-1, 1)
        late.copy_(grad)
        _whole_step(place, late, shard, segments, state)
    found = [getattr(shard, name).clone() for name in TENSORS]
    waited = not place.dry and torch.cuda.current_stream(place.device).query()
    return found, waited


def check_graph(place: Place) -> tuple[list[str], bool]:
    """Return whether replays of a CUDA graph are the steps without one."""
    if place.dry:
        return ["CUDA graph: not in a dry run"], False
    small = replace(place, numel=64 * CHUNK)
    grads = [grad.to(place.device) for grad in gradients(_VARIANT, _STEPS, small.numel)[2:]]
    plain, replayed = (prepared(small, _VARIANT) for _ in range(2))
    for grad in grads:
        _whole_step(small, grad, *plain)
    buffer = torch.empty_like(grads[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _whole_step(small, buffer, *replayed)
    for grad in grads:
        buffer.copy_(grad)
        graph.replay()
    torch.cuda.synchronize(place.device)
    pairs = zip(_tensors(replayed[0]), _tensors(plain[0]), strict=True)
    same = all(equal_bits(a, b) for a, b in pairs)
    return [f"CUDA graph: {'the same bits' if same else 'OTHER BITS'}"], not same


def _tensors(shard: Shard) -> list[Tensor]:
    return [getattr(shard, name).cpu() for name in TENSORS]


def _whole_step(
    place: Place, grad: Tensor, shard: Shard, segments: Segments, state: StepState
) -> None:
    partials = torch.empty(chunks_of(place.numel), dtype=torch.float64, device=place.device)
    norm2 = partials.new_empty(1)
    place.compiled.sum_of_squares(grad, segments, partials)
    place.compiled.reduce_partials(partials, norm2)
    place.compiled.prepare(state, norm2, 1.0, None)
    place.compiled.step(shard, grad, segments, state)
