"""Settings of the sharded optimizer and its gradient buckets, checked before any process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from goose_strategy.validate import at_least, flag, one_of, positive, whole

Preset: TypeAlias = Literal["auto", "fp32", "default", "compact"]
MainName: TypeAlias = Literal["fp32", "bf16+16", "bf16+8", "bf16"]
MomentName: TypeAlias = Literal["fp32", "bf16", "8bit"]
WireName: TypeAlias = Literal["fp32", "bf16"]

PRESETS: dict[str, tuple[MainName, MomentName, MomentName]] = {
    "fp32": ("fp32", "fp32", "fp32"),
    "default": ("bf16+16", "bf16", "bf16"),
    "compact": ("bf16+8", "8bit", "8bit"),
}
"""Main weights, first and second moments of every preset."""


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How gradients are bucketed and summed, and what the optimizer keeps of every parameter.

    Bytes per parameter are those of AdamW's state for bf16 weights, divided over the dp ranks.

    Args:
        bucket_numel: Elements after which a bucket is closed. Larger buckets need fewer
            collectives, smaller ones start earlier in the backward.
        overlap_reduce: Start the sum of a complete bucket while the backward still runs.
        preset: What the state is kept in. ``"fp32"``: fp32 main weights and moments (12 bytes).
            ``"default"``: bf16 moments, and 16 bits beside each bf16 weight that make it exactly
            fp32 (6 bytes). ``"compact"``: 8-bit moments and 8 bits beside each weight (3.06 bytes).
            ``"auto"``: ``"default"`` for the bf16 weights of AdamW, Adam, SGD and Lion, ``"fp32"``
            for everything else.
        main: Main weights, if not the preset's: ``"fp32"`` (a copy, or the parameter itself where
            it is fp32), ``"bf16+16"`` (exactly fp32), ``"bf16+8"`` (24 bits, rounded
            stochastically) or ``"bf16"`` (the weight alone, rounded stochastically).
        exp_avg: First moment (momentum), if not the preset's: ``"fp32"``, ``"bf16"`` (rounded to
            nearest) or ``"8bit"`` (e4m3 in blocks of 64 with a scale).
        exp_avg_sq: Second moment, if not the preset's: ``"fp32"``, ``"bf16"`` (rounded
            stochastically) or ``"8bit"`` (fourth roots in blocks of 64 with a scale).
        grads: Where the gradients of bf16 weights are accumulated. ``"bf16"`` saves two bytes per
            parameter and rounds at every microbatch.
        wire: In what fp32 gradients travel between replicas; the sum is taken in fp32 either way.
        overlap_param_gather: Do not wait for the weights of other ranks at the end of a step. They
            are waited for by the next forward, ``state_dict()``, a save, and
            ``strategy.synchronize_parameters()``; whoever reads or writes a
            parameter before meets old ones.
        skip_nonfinite: Also skip steps whose gradients are not finite where the state is all fp32.
            Such states are otherwise stepped by torch's kernels, which write NaN; all others are
            stepped by ours, which skip.
        max_skipped: Steps in a row that may be skipped before the run is ended.

    Raises:
        ConfigError: Naming the setting, its value and what is allowed.
    """

    bucket_numel: int = 4 * 2**20
    overlap_reduce: bool = True
    preset: Preset = "auto"
    main: MainName | None = None
    exp_avg: MomentName | None = None
    exp_avg_sq: MomentName | None = None
    grads: WireName = "fp32"
    wire: WireName = "fp32"
    overlap_param_gather: bool = False
    skip_nonfinite: bool = False
    max_skipped: int = 100

    def __post_init__(self) -> None:
        """Check the values."""
        whole(bucket_numel=self.bucket_numel, max_skipped=self.max_skipped)
        positive(bucket_numel=self.bucket_numel)
        at_least(1, max_skipped=self.max_skipped)
        one_of(["auto", *PRESETS], preset=self.preset)
        one_of([None, "fp32", "bf16+16", "bf16+8", "bf16"], main=self.main)
        moments = [None, "fp32", "bf16", "8bit"]
        one_of(moments, exp_avg=self.exp_avg)
        one_of(moments, exp_avg_sq=self.exp_avg_sq)
        one_of(["fp32", "bf16"], grads=self.grads)
        one_of(["fp32", "bf16"], wire=self.wire)
        flag(
            overlap_reduce=self.overlap_reduce,
            overlap_param_gather=self.overlap_param_gather,
            skip_nonfinite=self.skip_nonfinite,
        )

    @property
    def named(self) -> dict[str, str]:
        """What was chosen of the state's storage, by name; empty if all was left open."""
        chosen = {"preset": self.preset if self.preset != "auto" else None}
        chosen |= {name: getattr(self, name) for name in ("main", "exp_avg", "exp_avg_sq")}
        return {name: value for name, value in chosen.items() if value is not None}
