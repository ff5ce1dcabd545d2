"""8-bit moments go through a checkpoint without changing a bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cuda_ops import ops
from goose_strategy.optim.blocks import restore_moment

BLOCKS = 3000


def moments(*, positive: bool, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(BLOCKS, 64, generator=generator)
    # From denormal blocks to blocks of 1e30, wide and narrow ones, and some zeros.
    sizes = torch.exp(torch.linspace(-85, 69, BLOCKS))[:, None]
    spread = torch.exp(3 * torch.randn(BLOCKS, 64, generator=generator))
    values = values * sizes * torch.where(torch.arange(BLOCKS)[:, None] % 2 == 0, spread, 1.0)
    values[7] = 0.0
    values[:, 63] *= torch.arange(BLOCKS) % 3 > 0
    return (values.square() if positive else values).nan_to_num(0.0, posinf=3e38).view(-1)


def storage(kind: str) -> tuple[Tensor, Tensor | None]:
    n = BLOCKS * 64
    if kind == "first":
        return torch.zeros(n, dtype=torch.float8_e4m3fn), torch.zeros(BLOCKS, dtype=torch.bfloat16)
    if kind == "second":
        return torch.zeros(n, dtype=torch.uint8), torch.zeros(BLOCKS)
    return torch.zeros(n, dtype=torch.bfloat16), None


def read(codes: Tensor, scales: Tensor | None) -> Tensor:
    return ops.read_moment(codes, scales)


@pytest.mark.parametrize("kind", ["first", "second", "bf16"])
def test_what_was_read_is_written_back_exactly(kind: str) -> None:
    codes, scales = storage(kind)
    ops.write_moment(moments(positive=kind == "second"), codes, scales)
    values = read(codes, scales)
    again, its_scales = storage(kind)
    restore_moment(values, again, its_scales)
    assert torch.equal(read(again, its_scales), values)
    # Also the scales are the same, but for denormal blocks, where several decode alike.
    if scales is not None and its_scales is not None:
        used = values.view(BLOCKS, 64).abs().amax(1) > 1e-36
        assert torch.equal(its_scales[used], scales[used])


def test_encoding_anew_alone_would_not_do() -> None:
    codes, scales = storage("second")
    ops.write_moment(moments(positive=True), codes, scales)
    values = read(codes, scales)
    again, its_scales = storage("second")
    ops.write_moment(values, again, its_scales)
    assert not torch.equal(read(again, its_scales), values)


@pytest.mark.parametrize("kind", ["first", "second"])
def test_numbers_of_another_preset_are_encoded_like_any_others(kind: str) -> None:
    values = moments(positive=kind == "second", seed=1)
    codes, scales = storage(kind)
    ops.write_moment(values, codes, scales)
    mine, my_scales = storage(kind)
    restore_moment(values, mine, my_scales)
    assert torch.equal(mine.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(my_scales, scales)
