"""Bytes per parameter, and tables that name what is timed."""

from __future__ import annotations

import pytest
import torch

from cuda_ops.bench.place import Place
from cuda_ops.bench.speed import SHOWN, copy_bandwidth, time_torch, time_variants, traffic
from cuda_ops.layout import CHUNK, Main, Moment
from cuda_ops.reference.calls import Reference


@pytest.mark.parametrize(
    ("storage", "size"),
    [
        ((Main.FP32, Moment.FP32, Moment.FP32, torch.float32), 28.0),
        ((Main.SPLIT16, Moment.BF16, Moment.BF16, torch.bfloat16), 18.0),
        ((Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, torch.bfloat16), 12 + 2 * 6 / 64),
    ],
)
def test_traffic(storage: tuple[Main, Moment, Moment, torch.dtype], size: float) -> None:
    assert traffic(*storage) == pytest.approx(size)


def test_tables() -> None:
    place = Place(torch.device("cpu"), CHUNK, Reference(), Reference())
    copy = copy_bandwidth(place)
    assert copy > 0
    rows = time_variants(place, copy)[2:]
    assert [row.split("|")[1].strip() for row in rows] == [name for name, *_ in SHOWN]
    names = [row.split("|")[1].strip() for row in time_torch(place)[2:]]
    assert names == [
        "AdamW, fused, fp32",
        "gradients cast, clipped, fused, copied",
        "AdamW, foreach, fp32",
    ]
