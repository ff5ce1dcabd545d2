"""Where a check of a card runs, and how it measures there; on the CPU for a dry run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cuda_ops.bench.cases import Variant, new_state
from cuda_ops.layout import CHUNK, Segment, Segments, Shard
from cuda_ops.load import examine
from cuda_ops.reference.calls import Reference

if TYPE_CHECKING:
    from cuda_ops.state import StepState


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
