"""Pure torch, the CPU library and the CUDA kernels under the emulator give the same bits."""

from __future__ import annotations

import platform
import random
from pathlib import Path

import pytest
import torch

from cuda_ops.bench.cases import (
    MOMENTS,
    NUMEL,
    SEGMENTS,
    Variant,
    compare,
    cut,
    differences,
    equal_bits,
    train,
    variants,
)
from cuda_ops.bindings import Library
from cuda_ops.layout import (
    BLOCK,
    Main,
    Moment,
    Segments,
    Shard,
    chunks_of,
)
from cuda_ops.reference.calls import Reference
from cuda_ops.sources import CXX_FLAGS, INSTRUCTION_SETS
from cuda_ops.state import Algorithm
from tests.cuda_ops.compiled import cpu_library_with

MAINS = tuple(Main)
WHOLE = 2048 * 8

# One of everything for the emulator, which runs a step of 16384 elements in 50 ms.
FEW = [
    Variant(Algorithm.ADAM, Main.FP32, Moment.FP32, Moment.FP32, torch.float32),
    Variant(Algorithm.ADAM, Main.SPLIT16, Moment.BF16, Moment.BF16, torch.bfloat16),
    Variant(Algorithm.ADAM, Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, torch.bfloat16),
    Variant(Algorithm.ADAM, Main.BF16, Moment.BLOCK8, Moment.BF16, torch.float32),
    Variant(Algorithm.LION, Main.SPLIT16, Moment.BF16, Moment.NONE, torch.float32),
    Variant(Algorithm.SGD, Main.BF16, Moment.NONE, Moment.NONE, torch.bfloat16),
]


@pytest.mark.parametrize("main", MAINS)
def test_reference_and_cpu_library_agree_in_every_variant(main: Main, cpu: Library) -> None:
    which = [v for v in variants() if v.main == main]
    assert compare(Reference(), cpu, which) == {}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("main", MAINS)
def test_cpu_library_and_kernels_agree_in_every_variant(
    main: Main, cpu: Library, emulated: Library
) -> None:
    which = [v for v in variants() if v.main == main]
    # The second step of three is skipped; the third proves that it changed nothing.
    assert compare(cpu, emulated, which, steps=3) == {}


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_make_no_difference_in_any_variant(shards: int, cpu: Library) -> None:
    for variant in variants():
        whole = train(cpu, variant, numel=WHOLE)
        assert differences(whole, train(cpu, variant, numel=WHOLE, shards=shards)) == [], variant


@pytest.mark.timeout(180)
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_shards_make_no_difference_to_kernels(shards: int, cpu: Library, emulated: Library) -> None:
    for variant in FEW:
        whole = train(cpu, variant, numel=WHOLE, steps=1)
        cut_up = train(emulated, variant, numel=WHOLE, steps=1, shards=shards)
        assert differences(whole, cut_up) == [], variant


def test_shards_make_no_difference_to_the_reference(cpu: Library) -> None:
    for variant in FEW:
        whole = train(cpu, variant, numel=WHOLE)
        assert differences(whole, train(Reference(), variant, numel=WHOLE, shards=4)) == []


@pytest.mark.parametrize("main", MAINS)
def test_main_weights_in_and_out_agree_on_any_bits(
    main: Main, cpu: Library, emulated: Library
) -> None:
    values = any_floats()
    results = []
    for implementation in (Reference(), cpu, emulated):
        shard = Shard.allocate(len(values), main=main, exp_avg=Moment.NONE, exp_avg_sq=Moment.NONE)
        if main == Main.FP32:
            shard = Shard(main=main, rest=shard.rest, weight=values.bfloat16())
        implementation.split_main(shard, values)
        out = torch.empty_like(values)
        implementation.join_main(shard, out)
        results.append([t for t in (shard.weight, shard.rest, out) if t is not None])
    for other in results[1:]:
        assert all(equal_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("second", [False, True])
def test_moments_in_and_out_agree(
    kind: Moment, second: bool, cpu: Library, emulated: Library
) -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(NUMEL, generator=generator)
    # Blocks from the smallest to the largest moments that there are, and one of zeros.
    powers = torch.linspace(-44, 38, NUMEL // BLOCK).repeat_interleave(BLOCK)
    values = values.double().mul(10.0 ** powers.double()).clamp(-3e38, 3e38).float()
    values[:BLOCK] = 0.0
    values = values.square().clamp(max=3e38) if second else values
    results = []
    for implementation in (Reference(), cpu, emulated):
        made = Shard.allocate(
            NUMEL,
            main=Main.FP32,
            exp_avg=kind if not second else Moment.FP32,
            exp_avg_sq=kind if second else Moment.FP32,
        )
        codes = made.exp_avg_sq if second else made.exp_avg
        scales = made.exp_avg_sq_scale if second else made.exp_avg_scale
        assert codes is not None
        implementation.write_moment(values, codes, scales)
        out = torch.empty_like(values)
        implementation.read_moment(codes, scales, out)
        results.append([t for t in (codes.view(torch.uint8), scales, out) if t is not None])
    for other in results[1:]:
        assert all(equal_bits(a, b) for a, b in zip(results[0], other, strict=True))


def test_every_code_of_e4m3_agrees(cpu: Library, emulated: Library) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(BLOCK // 4).view(torch.float8_e4m3fn)
    scales = torch.ones(len(codes) // BLOCK, dtype=torch.bfloat16)
    expected = codes.float()
    for implementation in (Reference(), cpu, emulated):
        out = torch.empty(len(codes))
        implementation.read_moment(codes, scales, out)
        assert equal_bits(out, expected), implementation


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpack_agrees_and_adds_in_rank_order(
    dp: int, dtype: torch.dtype, cpu: Library, emulated: Library
) -> None:
    generator = torch.Generator().manual_seed(dp)
    received = torch.randn(dp, NUMEL, generator=generator).bfloat16()
    segments = Segments.build(NUMEL, SEGMENTS)
    expected = received[0].float()
    for row in received[1:]:
        expected = expected + row.float()
    expected = (expected * 0.5).to(dtype)
    results = []
    for implementation in (Reference(), cpu, emulated):
        out = torch.empty(NUMEL, dtype=dtype)
        partials = torch.empty(chunks_of(NUMEL), dtype=torch.float64)
        implementation.unpack(received, out, torch.tensor([0.5]), segments, partials)
        assert equal_bits(out, expected)
        results.append(partials)
    assert equal_bits(results[0], results[1])
    assert equal_bits(results[0], results[2])


def test_nothing_beyond_the_shard_is_touched(cpu: Library, emulated: Library) -> None:
    variant = FEW[2]
    for implementation in (cpu, emulated):
        guarded = Guarded()
        guarded.step(implementation, variant)
        assert guarded.intact(), implementation


@pytest.mark.parametrize("count", [1, 3, 1023, 1024, 1025, 5000])
def test_any_number_of_partials_is_reduced_alike(
    count: int, cpu: Library, emulated: Library
) -> None:
    partials = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    results = []
    for implementation in (Reference(), cpu, emulated):
        out = torch.empty(1, dtype=torch.float64)
        implementation.reduce_partials(partials, out)
        results.append(out)
    assert float(results[0]) == pytest.approx(float(partials.sum()), rel=1e-13)
    assert equal_bits(results[0], results[1])
    assert equal_bits(results[0], results[2])


def any_floats() -> torch.Tensor:
    """Return 14 blocks of fp32 values of all kinds: ties, specials, denormals and random bits."""
    generator = torch.Generator().manual_seed(11)
    bits = torch.randint(-(2**31), 2**31, (BLOCK * 12,), generator=generator, dtype=torch.int64)
    ties = (torch.arange(BLOCK, dtype=torch.int64) * 0x03FF0000) | 0x8000
    special = [0, 1, 0x7F800000, 0x7FFFFFFF, 0x7FC00000, 0x7F7FFFFF, 0x7F7F8000, 0x80, 0x8000]
    special += [value | 0x80000000 for value in special]
    rest = torch.tensor(special + [0x3F800080] * (BLOCK - len(special)), dtype=torch.int64)
    whole = torch.cat((bits, ties, rest))
    whole = torch.where(whole >= 2**31, whole - 2**32, whole)
    return whole.to(torch.int32).view(torch.float32)


class Guarded:
    """A shard between two margins that nobody may touch, with a tail of one block."""

    MARGIN = 4096
    NUMEL = 2048 + BLOCK

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def inner(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        whole = torch.full((tensor.nbytes + 2 * self.MARGIN,), 0x5A, dtype=torch.uint8)
        self.buffers.append(whole)
        return whole[self.MARGIN : -self.MARGIN].view(tensor.dtype)

    def step(self, implementation: Library, variant: Variant) -> None:
        from cuda_ops.bench.cases import gradients, initial, new_shard, new_state

        plain = new_shard(variant, self.NUMEL)
        names = ("weight", "rest", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
        tensors = {name: self.inner(getattr(plain, name)) for name in names}
        for tensor in tensors.values():
            if tensor is not None:
                tensor.view(torch.uint8).zero_()
        shard = Shard(main=variant.main, **tensors)
        segments = Segments.build(self.NUMEL, cut(SEGMENTS, 0, self.NUMEL))
        state = new_state(variant)
        implementation.split_main(shard, initial(self.NUMEL))
        (grad,) = gradients(variant, 1, self.NUMEL)
        implementation.prepare(state, torch.ones(1, dtype=torch.float64), 0.0, None)
        implementation.step(shard, grad, segments, state)

    def intact(self) -> bool:
        return all(
            bool((whole[: self.MARGIN] == 0x5A).all() and (whole[-self.MARGIN :] == 0x5A).all())
            for whole in self.buffers
        )


def test_segments_are_cut_for_any_border() -> None:
    # Of the tests' own helper: a shard that begins in the middle of a parameter continues it.
    rng = random.Random(0)
    for _ in range(50):
        begin = rng.randrange(0, NUMEL // BLOCK - 1) * BLOCK
        parts = cut(SEGMENTS, begin, NUMEL)
        whole = [s for s in SEGMENTS if s.start <= begin][-1]
        assert parts[0].start == 0
        assert parts[0].first == whole.first + begin - whole.start


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_make_no_difference(
    threads: int, cpu: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 500 chunks and a part of one, so that 7 threads have shares of different sizes.
    numel = 2048 * 500 + 64
    for variant in (FEW[2], FEW[4]):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        alone = train(cpu, variant, numel=numel, steps=1)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        assert differences(alone, train(cpu, variant, numel=numel, steps=1)) == []


X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.mark.parametrize("table", ["table_baseline", "table_v3"])
def test_instruction_sets_make_no_difference(table: str, built: Path, cpu: Library) -> None:
    if table != "table_baseline" and not (X86 and cpu.built_for in ("AVX2", "AVX-512")):
        pytest.skip("this processor has no AVX2")
    flags = (*CXX_FLAGS, *INSTRUCTION_SETS[table])
    assert compare(cpu, Library(cpu_library_with(built, flags)), variants()) == {}


def test_fused_multiply_add_would_be_found(built: Path, cpu: Library) -> None:
    if not (X86 and cpu.built_for in ("AVX2", "AVX-512")):
        pytest.skip("this processor has no fused multiply-add that is known here")
    fused = ("-O3", "-ffp-contract=fast", "-march=x86-64-v3")
    assert compare(cpu, Library(cpu_library_with(built, fused)), FEW[:1]) != {}
