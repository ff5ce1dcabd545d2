"""Steps a few variants with a library in a process of its own, which may be sanitized.

``python -m tests.cuda_ops.worker LIBRARY CPU_LIBRARY [misaligned]`` prints what differs from the
CPU library, as JSON. A sanitizer or the emulator ends the process instead.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from cuda_ops.bench.cases import SEGMENTS, Variant, compare, cut, new_shard, new_state
from cuda_ops.bindings import Library
from cuda_ops.layout import BLOCK, Main, Moment, Segments
from cuda_ops.state import Algorithm

# Those that are left where an emulator is built with fewer variants.
VARIANTS = [
    Variant(Algorithm.ADAM, Main.FP32, Moment.FP32, Moment.FP32, torch.float32),
    Variant(Algorithm.ADAM, Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, torch.bfloat16),
]


def step_misaligned(library: Library) -> None:
    """Step a shard whose gradient starts at a multiple of 4 bytes only."""
    variant = VARIANTS[0]
    numel = 2 * BLOCK
    shard, state = new_shard(variant, numel), new_state(variant)
    segments = Segments.build(numel, cut(SEGMENTS, 0, numel))
    library.step(shard, torch.zeros(numel + 1)[1:], segments, state)


def main() -> None:
    """Print what differs."""
    library, cpu = Library(Path(sys.argv[1])), Library(Path(sys.argv[2]))
    if "misaligned" in sys.argv:
        step_misaligned(library)
    print(json.dumps(compare(cpu, library, VARIANTS, steps=2)))


if __name__ == "__main__":
    main()
