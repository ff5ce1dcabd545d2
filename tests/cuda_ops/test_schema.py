"""The operators declare what they change, and their fakes what they return."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cuda_ops import ops, schema
from cuda_ops.bench.cases import (
    NUMEL,
    SEGMENTS,
    Variant,
    equal_bits,
    gradients,
    initial,
    new_shard,
    new_state,
)
from cuda_ops.layout import Main, Moment, Segments, chunks_of
from cuda_ops.state import Algorithm

VARIANT = Variant(Algorithm.ADAM, Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, torch.bfloat16)


def arguments() -> dict[str, tuple[Any, ...]]:
    segments = Segments.build(NUMEL, SEGMENTS)
    packed = schema.pack_segments(segments)
    # opcheck multiplies what was changed, and float8 tensors cannot be multiplied.
    variant = replace(VARIANT, first=Moment.BF16)
    shard, state = new_shard(variant), new_state(variant)
    ops.split_main(shard, initial())
    (grad,) = gradients(variant, 1)
    norm2 = torch.tensor([4.0], dtype=torch.float64)
    ops.prepare(state, norm2, max_norm=1.0)
    received = torch.randn(2, NUMEL, generator=torch.Generator().manual_seed(0)).bfloat16()
    return {
        "sum_of_squares": (grad, packed),
        "reduce_partials": (torch.arange(9, dtype=torch.float64),),
        "prepare_": (
            state.hyper,
            state.powers,
            state.derived,
            state.counters,
            state.scalars,
            norm2,
            torch.tensor([0.5]),
            1.0,
            int(state.algorithm),
        ),
        "step_": (
            shard.weight,
            shard.rest,
            shard.exp_avg,
            shard.exp_avg_scale,
            shard.exp_avg_sq,
            shard.exp_avg_sq_scale,
            grad,
            packed,
            state.derived,
            state.counters,
            state.scalars,
            int(state.algorithm),
            shard.main.value,
        ),
        "unpack": (received, torch.tensor([0.5]), packed),
    }


@pytest.mark.parametrize(
    "name", ["sum_of_squares", "reduce_partials", "prepare_", "step_", "unpack"]
)
def test_opcheck(name: str) -> None:
    # The autograd checks compare with derivatives, which no operator here has.
    torch.library.opcheck(
        getattr(torch.ops.goose3d, name).default,
        arguments()[name],
        {"narrow": True} if name == "unpack" else {},
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )


def test_a_compiled_step_is_the_step() -> None:
    segments = Segments.build(NUMEL, SEGMENTS)
    (grad,) = gradients(VARIANT, 1)
    plain, plain_state = new_shard(VARIANT), new_state(VARIANT)
    ops.split_main(plain, initial())
    partials = torch.empty(chunks_of(NUMEL), dtype=torch.float64)
    norm2 = torch.empty(1, dtype=torch.float64)
    ops.sum_of_squares(grad, segments, out=partials)
    ops.reduce_partials(partials, out=norm2)
    ops.prepare(plain_state, norm2, max_norm=1e-3)
    ops.step(plain, grad, segments=segments, state=plain_state)

    shard, state = new_shard(VARIANT), new_state(VARIANT)
    ops.split_main(shard, initial())
    packed = schema.pack_segments(segments)

    def step(gradient: torch.Tensor) -> None:
        made = torch.ops.goose3d.reduce_partials(torch.ops.goose3d.sum_of_squares(gradient, packed))
        torch.ops.goose3d.prepare_(
            state.hyper,
            state.powers,
            state.derived,
            state.counters,
            state.scalars,
            made,
            None,
            1e-3,
            int(state.algorithm),
        )
        torch.ops.goose3d.step_(
            shard.weight,
            shard.rest,
            shard.exp_avg,
            shard.exp_avg_scale,
            shard.exp_avg_sq,
            shard.exp_avg_sq_scale,
            gradient,
            packed,
            state.derived,
            state.counters,
            state.scalars,
            int(state.algorithm),
            shard.main.value,
        )

    torch.compile(step, backend="aot_eager", fullgraph=True)(grad)
    for name in ("weight", "rest", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
        assert equal_bits(getattr(shard, name), getattr(plain, name)), name
    assert int(state.step) == 1
