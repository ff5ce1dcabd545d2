"""What a shard of the optimizer is made of: kinds of storage and segments.

Megatron's and apex's optimizers pass lists of tensors to their kernels, with sizes and chunk
numbers in a table of 32-bit integers. Here a shard is one flat range; a sorted table of segments
says what lies where. All implementations (pure torch, CPU library, CUDA kernels) read the same
tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

BLOCK = 64
"""Elements that share the scales of 8-bit moments; every segment starts at a multiple of it."""

CHUNK = 2048
"""Elements of one partial sum of squares, and of one thread block."""


class Main(StrEnum):
    """How the main weights are kept."""

    FP32 = "fp32"
    SPLIT16 = "bf16+16"
    SPLIT8 = "bf16+8"
    BF16 = "bf16"


class Moment(StrEnum):
    """How one moment is kept."""

    NONE = "none"
    FP32 = "fp32"
    BF16 = "bf16"
    BLOCK8 = "8-bit"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of elements of one parameter.

    Args:
        start: First element within the shard, a multiple of 64.
        group: Row of the hyperparameters; ``-1`` leaves the elements untouched.
        norm_weight: What each squared gradient counts in the norm; 0 for a copy that another rank
            counts. Its NaN and inf still make the step skip.
        key: Key of the stochastic rounding, by ``rounding_key``.
        first: Element of the tp-local parameter that lies at ``start``, a multiple of 8.
    """

    start: int
    group: int = 0
    norm_weight: float = 1.0
    key: int = 0
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The segments of one shard as tensors, on the shard's device.

    Attributes:
        numel: Elements of the shard, a multiple of 64.
        start: ``[s]`` int64, ascending, the first one 0.
        group: ``[s]`` int32.
        norm_weight: ``[s]`` fp32.
        key: ``[s]`` int64 (the bits of an unsigned number).
        first: ``[s]`` int64.
        chunk_segment: ``[ceil(numel / 2048)]`` int32: the segment at the start of each chunk.
        inactive: Whether any segment has group -1.
    """

    numel: int
    start: Tensor
    group: Tensor
    norm_weight: Tensor
    key: Tensor
    first: Tensor
    chunk_segment: Tensor
    inactive: bool

    @classmethod
    def build(
        cls, numel: int, segments: Sequence[Segment], *, device: torch.device | str = "cpu"
    ) -> Segments:
        """Check a table and move it to the device.

        Args:
            numel: Elements of the shard; 0 for a rank that owns nothing, with no segments.
            segments: In the order of their elements. Each ends where the next one starts.
            device: Where the shard lies.

        Raises:
            ValueError: If the table does not describe ``numel`` elements.
        """
        _check_segments(numel, segments)
        chunks = chunks_of(numel)
        starts = torch.tensor([s.start for s in segments], dtype=torch.int64)
        at = torch.arange(chunks, dtype=torch.int64) * CHUNK
        chunk_segment = (torch.searchsorted(starts, at, right=True) - 1).to(torch.int32)
        return cls(
            numel=numel,
            start=starts.to(device),
            group=torch.tensor([s.group for s in segments], dtype=torch.int32, device=device),
            norm_weight=torch.tensor([s.norm_weight for s in segments], device=device).float(),
            key=torch.tensor([_signed(s.key) for s in segments], dtype=torch.int64, device=device),
            first=torch.tensor([s.first for s in segments], dtype=torch.int64, device=device),
            chunk_segment=chunk_segment.to(device),
            inactive=any(s.group < 0 for s in segments),
        )


@dataclass(frozen=True, kw_only=True)
class Shard:
    """The tensors of one flat shard; a step changes them in place.

    Attributes:
        main: How the main weights are kept.
        weight: ``[n]`` bf16, the model's weights. For ``FP32`` it may be ``None``; where it is
            there, it receives the main weights rounded to nearest.
        rest: What ``main`` needs beside the weight: ``[n]`` fp32 (the main weights), int16 or int8
            (the remainder), or ``None`` for ``BF16``.
        exp_avg: ``[n]`` fp32, bf16 or float8_e4m3fn: the first moment, or the momentum; ``None``
            for SGD without momentum.
        exp_avg_scale: ``[n / 64]`` bf16, for float8_e4m3fn only.
        exp_avg_sq: ``[n]`` fp32, bf16 or uint8 (codes of the fourth root); ``ADAM`` only.
        exp_avg_sq_scale: ``[n / 64]`` fp32, for uint8 only.
    """

    main: Main
    weight: Tensor | None
    rest: Tensor | None
    exp_avg: Tensor | None = None
    exp_avg_scale: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    exp_avg_sq_scale: Tensor | None = None

    def __post_init__(self) -> None:
        """Check types and sizes."""
        _check_shard(self)

    @property
    def numel(self) -> int:
        """Number of elements."""
        tensor = self.rest if self.weight is None else self.weight
        return 0 if tensor is None else tensor.numel()

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        tensor = self.rest if self.weight is None else self.weight
        return torch.device("cpu") if tensor is None else tensor.device

    @property
    def first_moment(self) -> Moment:
        """How the first moment is kept."""
        return moment_kind(self.exp_avg)

    @property
    def second_moment(self) -> Moment:
        """How the second moment is kept."""
        return moment_kind(self.exp_avg_sq)

    @classmethod
    def allocate(  # noqa: PLR0913  one argument per choice of storage
        cls,
        numel: int,
        *,
        main: Main,
        exp_avg: Moment,
        exp_avg_sq: Moment,
        weight: Tensor | None = None,
        rest: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Shard:
        """Make the state of a shard, zero where nothing is given.

        Args:
            numel: Elements, a multiple of 64.
            main: Storage of the main weights.
            exp_avg: Storage of the first moment.
            exp_avg_sq: Storage of the second moment; ``NONE`` for Lion and SGD.
            weight: Existing bf16 weights; made for every kind but ``FP32``.
            rest: Existing fp32 main weights or remainder.
            device: Where to allocate.

        Raises:
            ValueError: If a given tensor does not fit.
        """

        def zeros(dtype: torch.dtype, count: int = numel) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        blocks = numel // BLOCK
        if weight is None and main != Main.FP32:
            weight = zeros(torch.bfloat16)
        if rest is None and main != Main.BF16:
            rest = zeros(_REST[main])
        first, second = _FIRST.get(exp_avg), _SECOND.get(exp_avg_sq)
        return cls(
            main=main,
            weight=weight,
            rest=rest,
            exp_avg=None if first is None else zeros(first),
            exp_avg_scale=zeros(torch.bfloat16, blocks) if exp_avg == Moment.BLOCK8 else None,
            exp_avg_sq=None if second is None else zeros(second),
            exp_avg_sq_scale=zeros(torch.float32, blocks) if exp_avg_sq == Moment.BLOCK8 else None,
        )


def rounding_key(name: str, tp_rank: int | None = None) -> int:
    """Return the key of the stochastic rounding of a parameter.

    It depends on nothing that a layout changes: copies of a tied or replicated parameter round
    alike everywhere, and so does a shard of another size.

    Args:
        name: The parameter's name; one name for all copies of a tied parameter.
        tp_rank: The rank's slice where tp splits the parameter, else ``None``.
    """
    text = name if tp_rank is None else f"{name}\0{tp_rank}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def chunks_of(numel: int) -> int:
    """Return how many partial sums a shard of ``numel`` elements has."""
    return -(-numel // CHUNK)


def moment_kind(tensor: Tensor | None) -> Moment:
    """Return how a moment is kept, by the type of its tensor."""
    return Moment.NONE if tensor is None else _KINDS[tensor.dtype]


_REST = {Main.FP32: torch.float32, Main.SPLIT16: torch.int16, Main.SPLIT8: torch.int8}
_FIRST = {
    Moment.FP32: torch.float32,
    Moment.BF16: torch.bfloat16,
    Moment.BLOCK8: torch.float8_e4m3fn,
}
_SECOND = {Moment.FP32: torch.float32, Moment.BF16: torch.bfloat16, Moment.BLOCK8: torch.uint8}
_KINDS = {dtype: kind for table in (_FIRST, _SECOND) for kind, dtype in table.items()}


def _signed(key: int) -> int:
    return key - 2**64 if key >= 2**63 else key


def _check_segments(numel: int, segments: Sequence[Segment]) -> None:
    if numel < 0 or numel % BLOCK:
        raise ValueError(f"numel={numel}: the elements of a shard are a multiple of {BLOCK}")
    if bool(numel) != bool(segments):
        raise ValueError(f"numel={numel} with {len(segments)} segments: none belong to none")
    previous = -1
    for number, segment in enumerate(segments):
        if segment.start % BLOCK or not previous < segment.start < numel:
            raise ValueError(
                f"segments[{number}].start={segment.start}: ascending multiples of {BLOCK} below "
                f"{numel} are needed"
            )
        if number == 0 and segment.start:
            raise ValueError(f"segments[0].start={segment.start}: the first one starts at 0")
        if segment.first % 8 or segment.first < 0:
            raise ValueError(f"segments[{number}].first={segment.first}: not a multiple of 8")
        previous = segment.start


def _check_shard(shard: Shard) -> None:
    n = shard.numel
    if n % BLOCK:
        raise ValueError(f"a shard of {n} elements: they are a multiple of {BLOCK}")
    if shard.main != Main.FP32 and shard.weight is None:
        raise ValueError(f"main={shard.main.value} needs the bf16 weights")
    blocks = n // BLOCK
    first, second = shard.exp_avg, shard.exp_avg_sq
    wanted: list[tuple[str, Tensor | None, tuple[torch.dtype | None, ...], int]] = [
        ("weight", shard.weight, (torch.bfloat16, None), n),
        ("rest", shard.rest, (_REST.get(shard.main),), n),
        ("exp_avg", first, (*_FIRST.values(), None), n),
        ("exp_avg_sq", second, (*_SECOND.values(), None), n),
        (
            "exp_avg_scale",
            shard.exp_avg_scale,
            (torch.bfloat16 if shard.first_moment == Moment.BLOCK8 else None,),
            blocks,
        ),
        (
            "exp_avg_sq_scale",
            shard.exp_avg_sq_scale,
            (torch.float32 if shard.second_moment == Moment.BLOCK8 else None,),
            blocks,
        ),
    ]
    for name, tensor, dtypes, size in wanted:
        dtype = None if tensor is None else tensor.dtype
        if dtype not in dtypes:
            raise ValueError(f"{name} has dtype {dtype}; main={shard.main.value} needs {dtypes}")
        if tensor is not None and (tensor.shape != (size,) or not tensor.is_contiguous()):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; ({size},) is needed, dense")
