from __future__ import annotations

import pytest
import torch

from cuda_ops.layout import BLOCK, Main, Moment, Shard
from cuda_ops.reference.storage import (
    encode_main,
    join_main,
    read_moment,
    split_main,
    write_moment,
)

NUMEL = 4 * BLOCK


def values() -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("main", "error"),
    [(Main.FP32, 0.0), (Main.SPLIT16, 0.0), (Main.SPLIT8, 2.0**-16), (Main.BF16, 2.0**-8)],
)
def test_main_weights_return(main: Main, error: float) -> None:
    shard = Shard.allocate(NUMEL, main=main, exp_avg=Moment.NONE, exp_avg_sq=Moment.NONE)
    split_main(shard, values())
    out = torch.empty(NUMEL)
    join_main(shard, out)
    assert float(((out - values()) / values()).abs().max()) <= error


def test_weights_beside_fp32_are_rounded() -> None:
    weight = torch.zeros(NUMEL, dtype=torch.bfloat16)
    shard = Shard.allocate(
        NUMEL, main=Main.FP32, exp_avg=Moment.NONE, exp_avg_sq=Moment.NONE, weight=weight
    )
    split_main(shard, values())
    assert torch.equal(weight, values().bfloat16())


def test_nothing_random_is_needed_to_the_nearest() -> None:
    shard = Shard.allocate(NUMEL, main=Main.BF16, exp_avg=Moment.NONE, exp_avg_sq=Moment.NONE)
    weight, rest = encode_main(shard, values(), None)
    assert rest is None
    assert weight is not None
    assert torch.equal(weight, values().bfloat16())


@pytest.mark.parametrize(("kind", "error"), [(Moment.FP32, 0.0), (Moment.BF16, 2.0**-8)])
def test_moments_return(kind: Moment, error: float) -> None:
    shard = Shard.allocate(NUMEL, main=Main.FP32, exp_avg=kind, exp_avg_sq=kind)
    for moment in (shard.exp_avg, shard.exp_avg_sq):
        assert moment is not None
        write_moment(values(), moment, None)
        found = read_moment(moment, None)
        assert float(((found - values()) / values()).abs().max()) <= error
