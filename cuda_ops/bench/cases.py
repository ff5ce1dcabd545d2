"""Shards in every storage, stepped by any implementation, and their bits compared.

The tests use it on the CPU, the check of a card on the card.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from cuda_ops.layout import Main, Moment, Segment, Segments, Shard, chunks_of
from cuda_ops.state import Algorithm, Hyper, StepState

MOMENTS = (Moment.FP32, Moment.BF16, Moment.BLOCK8)


@dataclass(frozen=True)
class Variant:
    """An algorithm, its storage, and the type of the gradients."""

    algorithm: Algorithm
    main: Main
    first: Moment
    second: Moment
    grad: torch.dtype

    def __str__(self) -> str:
        kinds = [self.main.value, self.first.value, self.second.value]
        return "-".join([self.algorithm.name.lower(), *kinds, str(self.grad)[6:]])


def variants() -> list[Variant]:
    """Return every combination that there is: 128."""
    grads = (torch.float32, torch.bfloat16)
    adam = [(Algorithm.ADAM, m, v) for m, v in itertools.product(MOMENTS, MOMENTS)]
    lion = [(Algorithm.LION, m, Moment.NONE) for m in MOMENTS]
    sgd = [(Algorithm.SGD, m, Moment.NONE) for m in (Moment.NONE, *MOMENTS)]
    return [
        Variant(algorithm, main, first, second, grad)
        for (algorithm, first, second), main, grad in itertools.product(
            adam + lion + sgd, Main, grads
        )
    ]


HYPER: dict[Algorithm, Sequence[dict[Hyper, float]]] = {
    Algorithm.ADAM: (
        {Hyper.LR: 1e-3, Hyper.BETA1: 0.9, Hyper.BETA2: 0.999, Hyper.EPS: 1e-8}
        | {Hyper.WEIGHT_DECAY: 0.1, Hyper.DECOUPLED: 1},
        {Hyper.LR: 2e-3, Hyper.BETA1: 0.8, Hyper.BETA2: 0.95, Hyper.EPS: 1e-6}
        | {Hyper.WEIGHT_DECAY: 0.01, Hyper.SIGN: -1},
    ),
    Algorithm.LION: (
        {Hyper.LR: 1e-3, Hyper.BETA1: 0.9, Hyper.BETA2: 0.99, Hyper.WEIGHT_DECAY: 0.1}
        | {Hyper.DECOUPLED: 1},
        {Hyper.LR: 2e-3, Hyper.BETA1: 0.8, Hyper.BETA2: 0.9},
    ),
    Algorithm.SGD: (
        {Hyper.LR: 1e-1, Hyper.BETA1: 0.9, Hyper.BETA2: 0.1, Hyper.WEIGHT_DECAY: 0.1},
        {Hyper.LR: 2e-1, Hyper.BETA1: 0.8, Hyper.NESTEROV: 1},
    ),
}

NUMEL = 2048 * 3 + 64 * 7
"""Three whole chunks and a part of one."""

SEGMENTS = (
    Segment(start=0, group=0, key=0x0123456789ABCDEF, first=2**33),
    Segment(start=64, group=1, key=0xFEDCBA9876543210, first=0),
    Segment(start=2048 + 192, group=0, norm_weight=0.0, key=7, first=4096),
    Segment(start=4096, group=-1, key=8),
    Segment(start=4096 + 64, group=1, key=9, first=2**40 + 64),
    Segment(start=4096 + 128, group=0, norm_weight=0.5, key=10, first=64),
)


def new_state(variant: Variant, device: torch.device | str = "cpu") -> StepState:
    """Return a state with two groups of different hyperparameters."""
    state = StepState.allocate(variant.algorithm, 2, device=device)
    for row, values in enumerate(HYPER[variant.algorithm]):
        for column, value in values.items():
            state.hyper[row, column] = value
    return state


def new_shard(variant: Variant, numel: int = NUMEL, device: torch.device | str = "cpu") -> Shard:
    """Return a shard of zeros; fp32 main weights have bf16 weights beside them."""
    return Shard.allocate(
        numel,
        main=variant.main,
        exp_avg=variant.first,
        exp_avg_sq=variant.second,
        weight=torch.zeros(numel, dtype=torch.bfloat16, device=device),
        device=device,
    )


def cut(segments: Sequence[Segment], begin: int, end: int) -> list[Segment]:
    """Return the segments of a part of a shard."""
    stops = [s.start for s in segments[1:]] + [2**62]
    return [
        replace(s, start=max(s.start - begin, 0), first=s.first + max(begin - s.start, 0))
        for s, stop in zip(segments, stops, strict=True)
        if s.start < end and stop > begin
    ]


def gradients(variant: Variant, steps: int, numel: int = NUMEL) -> list[Tensor]:
    """Return gradients of very different sizes; a NaN in the second one makes its step skip."""
    generator = torch.Generator().manual_seed(steps)
    sizes = 10 ** (torch.rand(numel, generator=generator) * 8 - 8)
    made = []
    for number in range(steps):
        grad = torch.randn(numel, generator=generator) * sizes
        grad[::97] = 0.0
        if number == 1:
            grad[numel // 2] = float("nan")
        made.append(grad.to(variant.grad))
    return made


def initial(numel: int = NUMEL) -> Tensor:
    """Return main weights with a few extreme ones."""
    weights = torch.randn(numel, generator=torch.Generator().manual_seed(5)) * 0.02
    weights[3::511] = 3.0e38
    weights[5::511] = -3.39e38
    weights[7::511] = 1e-40
    return weights


Result = dict[str, Tensor]

TENSORS = ("weight", "rest", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")


@dataclass(frozen=True)
class Run:
    """How a model is trained.

    Args:
        steps: How many; the second one of them is skipped.
        shards: Into how many shards of whole chunks the model is cut.
        numel: Elements of the whole model.
        device: Where it lies.
    """

    steps: int = 3
    shards: int = 1
    numel: int = NUMEL
    device: str = "cpu"


def train(implementation: Any, variant: Variant, run: Run | None = None, **options: Any) -> Result:
    """Step a model and return all its tensors on the CPU, concatenated over the shards.

    Args:
        implementation: A ``Library`` or the ``Reference``.
        variant: What to step.
        run: How; or the fields of ``Run`` by name.
        options: See ``run``.
    """
    run = run or Run(**options)
    size = run.numel // run.shards
    weights = initial(run.numel)
    state = new_state(variant, run.device)
    tables, parts = [], []
    for begin in range(0, run.numel, size):
        part = cut(SEGMENTS, begin, begin + size)
        tables.append(Segments.build(size, part, device=run.device))
        parts.append(new_shard(variant, size, run.device))
        implementation.split_main(parts[-1], weights[begin : begin + size].clone().to(run.device))
    norm2 = torch.empty(1, dtype=torch.float64, device=run.device)
    scale = torch.tensor([0.25], device=run.device)
    partials = torch.empty(0)
    for grad in gradients(variant, run.steps, run.numel):
        pieces = [piece.clone().to(run.device) for piece in grad.split(size)]
        outs = [norm2.new_empty(chunks_of(size)) for _ in pieces]
        for piece, table, out in zip(pieces, tables, outs, strict=True):
            implementation.sum_of_squares(piece, table, out)
        partials = torch.cat(outs)
        implementation.reduce_partials(partials, norm2)
        implementation.prepare(state, norm2, 1e-4, scale)
        for shard, piece, table in zip(parts, pieces, tables, strict=True):
            implementation.step(shard, piece, table, state)
    result = {f"state.{f.name}": getattr(state, f.name) for f in fields(state)[1:]}
    result |= {"partials": partials, "norm2": norm2}
    for name in TENSORS:
        tensors = [getattr(shard, name) for shard in parts]
        if tensors[0] is not None:
            result[name] = torch.cat([t.view(torch.uint8) for t in tensors])
    return {name: tensor.cpu() for name, tensor in result.items()}


def differences(left: Result, right: Result) -> list[str]:
    """Return the names of tensors whose bits differ."""
    if left.keys() != right.keys():
        raise ValueError(f"{left.keys()} and {right.keys()} cannot be compared")
    return [name for name in left if not equal_bits(left[name], right[name])]


def equal_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same bits; any NaN equals any NaN."""
    if left.is_floating_point() and left.element_size() > 1:
        left, right = (torch.where(t.isnan(), torch.nan, t) for t in (left, right))
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def compare(
    left: Any, right: Any, which: Sequence[Variant], run: Run | None = None, **options: Any
) -> dict[str, list[str]]:
    """Train all variants with both implementations on one device; return what differs."""
    run = run or Run(**options)
    found = {}
    for variant in which:
        different = differences(train(left, variant, run), train(right, variant, run))
        if different:
            found[str(variant)] = different
    return found
