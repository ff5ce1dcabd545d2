"""What a step of the optimizer costs on a card: beside a copy, and beside torch's own steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cuda_ops.bench.cases import Variant
from cuda_ops.bench.place import Place, prepared, time_of
from cuda_ops.layout import Main, Moment, chunks_of
from cuda_ops.state import Algorithm

FP32, BF16 = torch.float32, torch.bfloat16

SHOWN = (
    ("fp32", Main.FP32, Moment.FP32, Moment.FP32, FP32),
    ("remainder, fp32 moments", Main.SPLIT16, Moment.FP32, Moment.FP32, BF16),
    ("default", Main.SPLIT16, Moment.BF16, Moment.BF16, FP32),
    ("default, bf16 gradients", Main.SPLIT16, Moment.BF16, Moment.BF16, BF16),
    ("compact", Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, FP32),
    ("compact, bf16 gradients", Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, BF16),
)
"""What is timed: a name, and the storage."""
_BYTES = {Moment.FP32: 4.0, Moment.BF16: 2.0}


def traffic(main: Main, first: Moment, second: Moment, grad: torch.dtype) -> float:
    """Return the bytes per parameter that a step of Adam reads and writes."""
    held = {Main.FP32: 4.0, Main.SPLIT16: 4.0, Main.SPLIT8: 3.0, Main.BF16: 2.0}[main]
    moments = _BYTES.get(first, 1 + 2 / 64) + _BYTES.get(second, 1 + 4 / 64)
    return (4.0 if grad == FP32 else 2.0) + 2 * (held + moments)


def copy_bandwidth(place: Place) -> float:
    """Return bytes per second, read and written, of a copy."""
    source = torch.ones(place.numel, device=place.device)
    target = torch.empty_like(source)
    return 8 * place.numel / time_of(place, lambda: target.copy_(source))


def time_variants(place: Place, copy: float) -> list[str]:
    """Return the table of the steps, with their share of the copy's bandwidth."""
    lines = [
        "| storage | B per parameter | ms per 1e9 | of copy | with norm, ms per 1e9 |",
        "|---|---|---|---|---|",
    ]
    for name, main, first, second, dtype in SHOWN:
        variant = Variant(Algorithm.ADAM, main, first, second, dtype)
        shard, segments, state = prepared(place, variant)
        grad = torch.full((place.numel,), 1e-3, device=place.device, dtype=dtype)
        partials = torch.empty(chunks_of(place.numel), dtype=torch.float64, device=place.device)
        step = time_of(place, partial(place.compiled.step, shard, grad, segments, state))
        norm = time_of(place, partial(place.compiled.sum_of_squares, grad, segments, partials))
        size = traffic(main, first, second, dtype)
        share = size * place.numel / step / copy
        scale = 1e12 / place.numel
        lines.append(
            f"| {name} | {size:.2f} | {step * scale:.2f} | {100 * share:.0f} % "
            f"| {(step + norm) * scale:.2f} |"
        )
    return lines


def time_torch(place: Place) -> list[str]:
    """Return the table of torch's own steps and of the usual recipe for bf16."""
    lines = ["| torch | ms per 1e9 |", "|---|---|"]
    weight = torch.nn.Parameter(torch.full((place.numel,), 0.02, device=place.device))
    half = weight.detach().bfloat16()
    half_grad = torch.full((place.numel,), 1e-3, device=place.device, dtype=BF16)
    weight.grad = half_grad.float()
    scale = 1e12 / place.numel
    for name, options in (("fused", {"fused": True}), ("foreach", {"foreach": True})):
        optimizer = torch.optim.AdamW([weight], lr=1e-3, **options)  # type: ignore[arg-type]
        taken = time_of(place, optimizer.step, repeats=5)
        lines.append(f"| AdamW, {name}, fp32 | {taken * scale:.2f} |")
        if name == "fused":

            def recipe(step: Callable[[], Any] = optimizer.step) -> None:
                weight.grad = half_grad.float()
                torch.nn.utils.clip_grad_norm_([weight], 1.0)
                step()
                half.copy_(weight.detach())

            taken = time_of(place, recipe, repeats=5)
            lines.append(f"| gradients cast, clipped, fused, copied | {taken * scale:.2f} |")
        del optimizer
    return lines
