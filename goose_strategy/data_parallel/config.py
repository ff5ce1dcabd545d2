"""Settings of the gradient buckets, checked before any process group exists."""

from __future__ import annotations

from dataclasses import dataclass

from goose_strategy.validate import positive, whole


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How gradients are bucketed and reduced.

    Args:
        bucket_numel: Elements after which a bucket is closed. Larger buckets need fewer
            collectives, smaller ones start earlier in the backward.
        overlap_reduce: Start the sum of a complete bucket while the backward still runs.

    Raises:
        ConfigError: If ``bucket_numel`` is no positive whole number.
    """

    bucket_numel: int = 4 * 2**20
    overlap_reduce: bool = True

    def __post_init__(self) -> None:
        """Check the values."""
        whole(bucket_numel=self.bucket_numel)
        positive(bucket_numel=self.bucket_numel)
