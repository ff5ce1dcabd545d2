from __future__ import annotations

import torch

from cuda_ops.layout import Segment, Segments, chunks_of
from cuda_ops.reference.norm import sum_of_squares
from cuda_ops.reference.unpack import unpack


def test_the_sum_is_in_fp32_and_its_norm_that_of_what_was_written() -> None:
    # 256 + 1 is 256 in bf16; a sum in bf16 would stay there.
    received = torch.ones(9, 128, dtype=torch.bfloat16)
    received[0] = 256.0
    segments = Segments.build(128, [Segment(start=0)])
    for dtype in (torch.float32, torch.bfloat16):
        out, partials = torch.empty(128, dtype=dtype), torch.empty(1, dtype=torch.float64)
        unpack(received, out, torch.tensor([0.5]), segments, partials)
        assert torch.equal(out, torch.full((128,), 132.0, dtype=dtype))
        again = torch.empty(1, dtype=torch.float64)
        sum_of_squares(out, segments, again)
        assert torch.equal(partials, again)


def test_no_elements() -> None:
    received = torch.empty(4, 0, dtype=torch.bfloat16)
    partials = torch.empty(chunks_of(0), dtype=torch.float64)
    unpack(received, torch.empty(0), None, Segments.build(0, []), partials)
