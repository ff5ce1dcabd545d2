"""The same calls as operators of torch, ``torch.ops.goose3d.*``, for code that is compiled.

``cuda_ops.ops`` calls the libraries directly, which costs a few microseconds; a dispatched operator
costs more. Within ``torch.compile`` only an operator with a fake implementation can be seen, and
only one that declares what it changes is safe. None has a derivative: they run after the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from cuda_ops import ops
from cuda_ops.layout import Main, Segments, Shard, chunks_of
from cuda_ops.state import Algorithm, StepState

_SHARD = (
    "weight",
    "rest",
    "exp_avg",
    "exp_avg_scale",
    "exp_avg_sq",
    "exp_avg_sq_scale",
)


def pack_segments(segments: Segments) -> list[Tensor]:
    """Return the tensors of a table in the order that the operators expect."""
    s = segments
    return [s.start, s.group, s.norm_weight, s.key, s.first, s.chunk_segment]


def _unpack_segments(tensors: Sequence[Tensor], numel: int) -> Segments:
    start, group, norm_weight, key, first, chunk_segment = tensors
    return Segments(
        numel=numel,
        start=start,
        group=group,
        norm_weight=norm_weight,
        key=key,
        first=first,
        chunk_segment=chunk_segment,
        # Whether a group is negative is not looked up: the answer would make the host wait.
        inactive=True,
    )


@custom_op("goose3d::sum_of_squares", mutates_args=())
def sum_of_squares(grad: Tensor, segments: Sequence[Tensor]) -> Tensor:
    """Return the partial sums of ``ops.sum_of_squares``, fp64 ``[chunks]``."""
    out = torch.empty(chunks_of(grad.numel()), dtype=torch.float64, device=grad.device)
    ops.sum_of_squares(grad, _unpack_segments(segments, grad.numel()), out=out)
    return out


@sum_of_squares.register_fake
def _(grad: Tensor, segments: Sequence[Tensor]) -> Tensor:  # noqa: ARG001  named by the schema
    return torch.empty_like(segments[5], dtype=torch.float64)


@custom_op("goose3d::reduce_partials", mutates_args=())
def reduce_partials(partials: Tensor) -> Tensor:
    """Return the sum of ``ops.reduce_partials``, fp64 ``[1]``."""
    out = partials.new_empty(1)
    ops.reduce_partials(partials, out=out)
    return out


@reduce_partials.register_fake
def _(partials: Tensor) -> Tensor:
    return partials.new_empty(1)


@custom_op("goose3d::prepare_", mutates_args=("powers", "derived", "counters", "scalars"))
def prepare_(  # noqa: PLR0913  a schema has no dataclasses
    hyper: Tensor,
    powers: Tensor,
    derived: Tensor,
    counters: Tensor,
    scalars: Tensor,
    norm2: Tensor,
    scale: Tensor | None,
    max_norm: float,
    algorithm: int,
) -> None:
    """See ``ops.prepare``; the tensors are those of ``StepState``."""
    state = StepState(
        algorithm=Algorithm(algorithm),
        hyper=hyper,
        powers=powers,
        derived=derived,
        counters=counters,
        scalars=scalars,
    )
    ops.prepare(state, norm2, max_norm=max_norm, scale=scale)


@custom_op("goose3d::step_", mutates_args=_SHARD)
def step_(  # noqa: PLR0913  a schema has no dataclasses
    weight: Tensor | None,
    rest: Tensor | None,
    exp_avg: Tensor | None,
    exp_avg_scale: Tensor | None,
    exp_avg_sq: Tensor | None,
    exp_avg_sq_scale: Tensor | None,
    grad: Tensor,
    segments: Sequence[Tensor],
    derived: Tensor,
    counters: Tensor,
    scalars: Tensor,
    algorithm: int,
    main: str,
) -> None:
    """See ``ops.step``; the tensors are those of ``Shard`` and ``StepState``."""
    shard = Shard(
        main=Main(main),
        weight=weight,
        rest=rest,
        exp_avg=exp_avg,
        exp_avg_scale=exp_avg_scale,
        exp_avg_sq=exp_avg_sq,
        exp_avg_sq_scale=exp_avg_sq_scale,
    )
    state = StepState(
        algorithm=Algorithm(algorithm),
        hyper=derived.new_empty(0),
        powers=derived.new_empty(0),
        derived=derived,
        counters=counters,
        scalars=scalars,
    )
    ops.step(shard, grad, segments=_unpack_segments(segments, grad.numel()), state=state)


@custom_op("goose3d::unpack", mutates_args=())
def unpack(
    received: Tensor, scale: Tensor | None, segments: Sequence[Tensor], *, narrow: bool
) -> tuple[Tensor, Tensor]:
    """Return the sum of ``ops.unpack`` (bf16 if ``narrow``, else fp32) and its partial sums."""
    n = received.shape[1]
    out = received.new_empty(n, dtype=torch.bfloat16 if narrow else torch.float32)
    partials = torch.empty(chunks_of(n), dtype=torch.float64, device=received.device)
    table = _unpack_segments(segments, n)
    ops.unpack(received, out=out, scale=scale, segments=table, partials=partials)
    return out, partials


@unpack.register_fake
def _(
    received: Tensor,
    scale: Tensor | None,  # noqa: ARG001  named by the schema
    segments: Sequence[Tensor],
    *,
    narrow: bool,
) -> tuple[Tensor, Tensor]:
    out = received.new_empty(received.shape[1], dtype=torch.bfloat16 if narrow else torch.float32)
    return out, torch.empty_like(segments[5], dtype=torch.float64)
