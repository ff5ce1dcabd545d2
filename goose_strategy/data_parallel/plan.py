"""Which parameter lies where in which bucket: pure data, the same on every dp rank.

``DistributedDataParallel`` plans buckets by size alone. A ZeRO-1 bucket is stepped as a whole, so
its parameters must also agree in everything the optimizer and the norm distinguish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from goose_strategy.errors import ConfigError

if TYPE_CHECKING:
    from goose_strategy.mesh.shard import ShardSpec

ALIGNMENT = 64
"""Elements to which each parameter is aligned in a bucket: 128 bytes in bf16, for GEMM kernels."""

SLICE_MULTIPLE = 2048
"""Elements of which each rank's slice of a bucket is a multiple."""


@dataclass(frozen=True, kw_only=True)
class BucketKey:
    """What all parameters of one bucket have in common.

    Args:
        dtype: Type of the parameters.
        tp_replicated: Every tp rank holds the same elements, so norms count one of them.
        tp_partial: Gradients have to be summed over tp first.
        tie: Name of the tied weight that the bucket's parameter is a copy of.
        tie_owner: ``False`` on the copy that norms leave out.
        optimizer: Index of the optimizer that steps the parameters, if any.
        group: Index of its parameter group.
        narrow: Gradients of bf16 parameters are accumulated in bf16.
        stage: The one stage of this rank that uses the parameters; ``None`` if stages are not told
            apart.
        shared: Several stages of this rank use the parameter.
    """

    dtype: torch.dtype
    tp_replicated: bool = False
    tp_partial: bool = False
    tie: str | None = None
    tie_owner: bool = True
    optimizer: int | None = None
    group: int | None = None
    narrow: bool = False
    stage: int | None = None
    shared: bool = False

    @property
    def late(self) -> bool:
        """Whether the bucket waits for the end of the backward.

        Its first sum runs on a communicator that the layers (tp) or another stage (tie) use too;
        only after the backward is the order of the launches the same on all its members. And what
        several stages use is complete when the last of them is, whichever that may be.
        """
        return self.tp_partial or self.tie is not None or self.shared

    @property
    def turn(self) -> tuple[bool, int]:
        """When the bucket starts among others: stages from last to first, then those that wait."""
        return self.late, 0 if self.late or self.stage is None else -self.stage

    @property
    def accumulator_dtype(self) -> torch.dtype:
        """Type in which gradients are accumulated."""
        return torch.bfloat16 if self.narrow else self.main_dtype

    @property
    def main_dtype(self) -> torch.dtype:
        """Type of the main weights, and of whatever is computed with them."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Entry:
    """One parameter to be planned."""

    name: str
    numel: int
    key: BucketKey


@dataclass
class BucketLayout:
    """Places of parameters in one flat range.

    Attributes:
        key: What the parameters have in common.
        entries: The parameters, in backward order.
        starts: First element of each parameter.
        size: Elements of the flat range, a multiple of ``dp * SLICE_MULTIPLE``.
        closes: Position in backward order of the last parameter.
    """

    key: BucketKey
    entries: list[Entry] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    size: int = 0
    closes: int = -1

    def append(self, entry: Entry, position: int) -> None:
        """Put one more parameter at the end."""
        self.starts.append(self.size)
        self.entries.append(entry)
        self.size += -(-entry.numel // ALIGNMENT) * ALIGNMENT
        self.closes = position


def plan_buckets(
    entries: Iterable[Entry], *, dp_size: int, bucket_numel: int
) -> list[BucketLayout]:
    """Distribute parameters over buckets.

    Args:
        entries: Parameters in module order.
        dp_size: Ranks that share a bucket.
        bucket_numel: A bucket that has this many elements is closed; a single larger parameter
            has a bucket of its own.

    Returns:
        Buckets in the order in which a schedule's backwards complete them: those of the last stage
        first, and within a stage from its end; those that wait for the end of them all last.
    """
    open_buckets: dict[BucketKey, BucketLayout] = {}
    buckets: list[BucketLayout] = []
    for position, entry in enumerate(reversed(list(entries))):
        bucket = open_buckets.get(entry.key)
        if bucket is None or bucket.size + entry.numel > bucket_numel:
            bucket = BucketLayout(entry.key)
            open_buckets[entry.key] = bucket
            buckets.append(bucket)
        bucket.append(entry, position)
    quantum = dp_size * SLICE_MULTIPLE
    for bucket in buckets:
        bucket.size = -(-bucket.size // quantum) * quantum
    key = lambda b: (b.key.tie is not None, *b.key.turn, b.closes)  # noqa: E731
    return sorted(buckets, key=key)


def plan_entries(
    params: Sequence[tuple[str, nn.Parameter]],
    specs: Mapping[str, ShardSpec],
    owner_of: Mapping[str, tuple[int, int]],
    *,
    tp_size: int,
    narrow: bool = False,
    stage_of: Mapping[str, int] | None = None,
) -> list[Entry]:
    """Return what `plan_buckets` needs to know of parameters that have to be trained.

    Args:
        params: Trainable parameters by name, in module order.
        specs: What is known of their layout; one that is missing is replicated over tp.
        owner_of: Optimizer index and group index by name.
        tp_size: Ranks that share a layer.
        narrow: Accumulate the gradients of bf16 parameters in bf16.
        stage_of: Stage by name; several stages use a parameter without an entry. ``None`` or empty
            where stages are not told apart.

    Raises:
        ConfigError: If a parameter is not real floating point.
    """
    entries = []
    for name, param in params:
        if not param.dtype.is_floating_point:
            raise ConfigError(
                f"parameter {name!r} has dtype={param.dtype}; only real floating-point parameters "
                "can be trained, set requires_grad=False on this one."
            )
        spec = specs.get(name)
        optimizer, group = owner_of.get(name, (None, None))
        sharded = tp_size == 1 or (spec is not None and spec.is_sharded)
        key = BucketKey(
            dtype=param.dtype,
            tp_replicated=not sharded,
            tp_partial=tp_size > 1 and spec is not None and spec.tp_partial,
            tie=None if spec is None else spec.tie,
            tie_owner=spec is None or spec.tie_owner,
            optimizer=optimizer,
            group=group,
            narrow=narrow and param.dtype == torch.bfloat16,
            stage=stage_of.get(name) if stage_of else None,
            shared=bool(stage_of) and name not in (stage_of or ()),
        )
        entries.append(Entry(name, param.numel(), key))
    return entries
