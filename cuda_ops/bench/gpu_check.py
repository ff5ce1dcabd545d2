"""One run on one card, at most two minutes: ``python -m cuda_ops.bench.gpu_check``.

What can be checked without a card is checked by the tests: bits under an emulator, machine code,
loading. This script checks the rest, and prints Markdown tables for ``README.md`` beside it: bits
of the card, bandwidth, CUDA graphs, streams. ``--dry-run`` goes the same way on a CPU.
"""

from __future__ import annotations

import argparse
import datetime
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cuda_ops.bench.cases import (
    TENSORS,
    Run,
    Variant,
    differences,
    equal_bits,
    gradients,
    new_state,
    train,
    variants,
)
from cuda_ops.layout import CHUNK, Main, Moment, Segment, Segments, Shard, chunks_of
from cuda_ops.load import examine
from cuda_ops.reference.calls import Reference
from cuda_ops.state import Algorithm, StepState

FP32, BF16 = torch.float32, torch.bfloat16

_SHOWN = (
    ("fp32", Main.FP32, Moment.FP32, Moment.FP32, FP32),
    ("remainder, fp32 moments", Main.SPLIT16, Moment.FP32, Moment.FP32, BF16),
    ("default", Main.SPLIT16, Moment.BF16, Moment.BF16, FP32),
    ("default, bf16 gradients", Main.SPLIT16, Moment.BF16, Moment.BF16, BF16),
    ("compact", Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, FP32),
    ("compact, bf16 gradients", Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, BF16),
)
_BYTES = {Moment.FP32: 4.0, Moment.BF16: 2.0}


@dataclass(frozen=True)
class Place:
    """Where the check runs.

    Attributes:
        device: The card, or the CPU in a dry run.
        numel: Elements of the timed shards.
        compiled: What is checked.
        other: What its bits are compared with, on the CPU.
    """

    device: torch.device
    numel: int
    compiled: Any
    other: Any

    @property
    def dry(self) -> bool:
        """Whether there is no card."""
        return self.device.type == "cpu"


def traffic(main: Main, first: Moment, second: Moment, grad: torch.dtype) -> float:
    """Return the bytes per parameter that a step of Adam reads and writes."""
    held = {Main.FP32: 4.0, Main.SPLIT16: 4.0, Main.SPLIT8: 3.0, Main.BF16: 2.0}[main]
    moments = _BYTES.get(first, 1 + 2 / 64) + _BYTES.get(second, 1 + 4 / 64)
    return (4.0 if grad == FP32 else 2.0) + 2 * (held + moments)


def check_bits(place: Place) -> list[str]:
    """Return the lines about bits: every variant, whole and in shards, beside the other library."""
    wrong = []
    for variant in variants():
        for shards, numel in ((1, 2048 * 3 + 448), (4, 2048 * 8)):
            here = Run(shards=shards, numel=numel, device=str(place.device))
            there = Run(shards=1, numel=numel)
            found = differences(
                train(place.compiled, variant, here), train(place.other, variant, there)
            )
            wrong += [f"  {variant} in {shards} shards: {', '.join(found)}"] if found else []
    total = 2 * len(variants())
    return [f"bits as on the CPU: {total - len(wrong)} of {total} runs", *wrong]


def check_reference(place: Place) -> list[str]:
    """Return the line about bits of pure torch on the device, the fallback without a library."""
    wrong = []
    for _, main, first, second, grad in _SHOWN:
        variant = Variant(Algorithm.ADAM, main, first, second, grad)
        here = train(Reference(), variant, device=str(place.device))
        found = differences(here, train(place.compiled, variant, device=str(place.device)))
        wrong += [f"  {variant}: {', '.join(found)}"] if found else []
    return [f"pure torch beside the library: {len(_SHOWN) - len(wrong)} of {len(_SHOWN)}", *wrong]


def time_of(place: Place, call: Callable[[], Any], repeats: int = 20) -> float:
    """Return seconds per call: events on a card, the thread's time on a CPU."""
    call()
    if place.dry:
        started = time.thread_time()
        call()
        return max(time.thread_time() - started, 1e-9)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        call()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


def copy_bandwidth(place: Place) -> float:
    """Return bytes per second, read and written, of a copy."""
    source = torch.ones(place.numel, device=place.device)
    target = torch.empty_like(source)
    return 8 * place.numel / time_of(place, lambda: target.copy_(source))


def prepared(place: Place, variant: Variant) -> tuple[Shard, Segments, StepState]:
    """Return a shard of ones with one segment, ready to be stepped."""
    shard = Shard.allocate(
        place.numel,
        main=variant.main,
        exp_avg=variant.first,
        exp_avg_sq=variant.second,
        device=place.device,
    )
    place.compiled.split_main(shard, torch.full((place.numel,), 0.02, device=place.device))
    segments = Segments.build(place.numel, [Segment(start=0)], device=place.device)
    state = new_state(variant, place.device)
    norm2 = torch.ones(1, dtype=torch.float64, device=place.device)
    place.compiled.prepare(state, norm2, 1.0, None)
    return shard, segments, state


def time_variants(place: Place, copy: float) -> list[str]:
    """Return the table of the steps, with their share of the copy's bandwidth."""
    lines = [
        "| storage | B per parameter | ms per 1e9 | of copy | with norm, ms per 1e9 |",
        "|---|---|---|---|---|",
    ]
    for name, main, first, second, dtype in _SHOWN:
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


def check_graph(place: Place) -> list[str]:
    """Return whether replays of a CUDA graph are the steps without one, on another stream."""
    if place.dry:
        return ["CUDA graph and stream: not in a dry run"]
    variant = Variant(Algorithm.ADAM, Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, BF16)
    numel = 64 * CHUNK
    grads = [g.to(place.device) for g in gradients(variant, 5, numel)[2:]]
    small = Place(place.device, numel, place.compiled, place.other)
    plain, replayed, streamed = (prepared(small, variant) for _ in range(3))
    for grad in grads:
        _whole_step(small, grad, *plain)
    buffer = torch.empty_like(grads[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _whole_step(small, buffer, *replayed)
    for grad in grads:
        buffer.copy_(grad)
        graph.replay()
    # Gradients that are still being written on the stream that the step runs on.
    stream = torch.cuda.Stream(place.device)
    stream.wait_stream(torch.cuda.current_stream(place.device))
    with torch.cuda.stream(stream):
        late = torch.zeros_like(grads[0])
        busy = torch.ones(4096, 4096, device=place.device)
        for grad in grads:
            late.zero_()
            for _ in range(8):
                busy = (busy @ busy).clamp(-1, 1)
            late.copy_(grad)
            _whole_step(small, late, *streamed)
    torch.cuda.synchronize(place.device)
    results = []
    for name, (shard, _, _) in (("CUDA graph", replayed), ("side stream", streamed)):
        same = all(equal_bits(getattr(shard, t).cpu(), getattr(plain[0], t).cpu()) for t in TENSORS)
        results.append(f"{name}: {'the same bits' if same else 'OTHER BITS'}")
    return results


def _whole_step(
    place: Place, grad: torch.Tensor, shard: Shard, segments: Segments, state: StepState
) -> None:
    partials = torch.empty(chunks_of(place.numel), dtype=torch.float64, device=place.device)
    norm2 = partials.new_empty(1)
    place.compiled.sum_of_squares(grad, segments, partials)
    place.compiled.reduce_partials(partials, norm2)
    place.compiled.prepare(state, norm2, 1.0, None)
    place.compiled.step(shard, grad, segments, state)


def find_place(*, dry: bool) -> Place:
    """Return what is checked, and with what it is compared.

    Raises:
        RuntimeError: If the library does not run here; the message says why.
    """
    cpu, why = examine(torch.device("cpu"))
    if cpu is None:
        raise RuntimeError(f"the CPU library does not run: {why}")
    if dry:
        return Place(torch.device("cpu"), 16 * CHUNK, cpu, Reference())
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no card; --dry-run goes without one")
    device = torch.device("cuda", torch.cuda.current_device())
    library, why = examine(device)
    if library is None:
        raise RuntimeError(f"the CUDA library does not run: {why}")
    free, _ = torch.cuda.mem_get_info(device)
    # Torch's fused AdamW and the recipe need 26 bytes per parameter, at most half of what is free.
    numel = min(2**29, 2 ** int(math.log2(free / 52))) // CHUNK * CHUNK
    return Place(device, numel, library, cpu)


def heading(place: Place) -> str:
    """Return card, date and versions."""
    name = platform.processor() or platform.machine()
    if not place.dry:
        name = torch.cuda.get_device_name(place.device)
    today = datetime.datetime.now(tz=datetime.UTC).date()
    built = place.compiled.built_for
    return (
        f"{name}, {today}, torch {torch.__version__}, library for {built}, {place.numel} elements"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; returns 1 if any bit differs."""
    parser = argparse.ArgumentParser(prog="python -m cuda_ops.bench.gpu_check", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small shards")
    options = parser.parse_args(arguments)
    try:
        place = find_place(dry=options.dry_run)
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    started = time.monotonic()
    bad = False

    def say(lines: Sequence[str]) -> None:
        sys.stdout.write("\n".join(lines) + "\n\n")
        sys.stdout.flush()

    say([heading(place)])
    bits = check_bits(place)
    bad |= len(bits) > 1
    say(bits)
    fallback = check_reference(place)
    bad |= len(fallback) > 1
    say(fallback)
    graph = check_graph(place)
    bad |= any("OTHER" in line for line in graph)
    say(graph)
    copy = copy_bandwidth(place)
    say([f"copy: {copy / 1e12:.3f} TB/s"])
    say(time_variants(place, copy))
    say(time_torch(place))
    say([f"{time.monotonic() - started:.0f} s in all"])
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
