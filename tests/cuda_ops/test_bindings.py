"""The C interface: structures as in abi.h, errors with words, and more than 2^31 elements."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
from pathlib import Path

import pytest
import torch

from cuda_ops import bindings
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
from cuda_ops.bindings import Library, LibraryError, step_args
from cuda_ops.layout import BLOCK, CHUNK, Main, Moment, Segment, Segments, Shard, chunks_of
from cuda_ops.sources import CSRC
from cuda_ops.state import Algorithm
from tests.cuda_ops.compiled import CXX

VARIANT = Variant(Algorithm.ADAM, Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, torch.bfloat16)

STRUCTURES = {
    "goose_segments": bindings._Segments,
    "goose_step_args": bindings._StepArgs,
    "goose_prepare_args": bindings._PrepareArgs,
    "goose_norm_args": bindings._NormArgs,
    "goose_convert_args": bindings._ConvertArgs,
}


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    if CXX is None:
        pytest.skip("no C++ compiler")
    lines = ['#include "abi.h"', "#include <cstddef>", "#include <cstdio>", "int main() {"]
    expected = []
    for name, structure in STRUCTURES.items():
        for field, *_ in structure._fields_:
            lines.append(f'std::printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected.append(f"{name}.{field} {getattr(structure, field).offset}")
        lines.append(f'std::printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
    source = tmp_path / "offsets.cpp"
    source.write_text("\n".join([*lines, "}"]), encoding="utf-8")
    program = tmp_path / "offsets"
    subprocess.run([CXX, f"-I{CSRC}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert printed.split("\n")[:-1] == expected


def test_every_function_of_the_header_is_in_both_libraries(cpu: Library, emulated: Library) -> None:
    names = re.findall(r"^\S.*?(goose_\w+)\(", (CSRC / "abi.h").read_text(), flags=re.MULTILINE)
    assert len(names) == 13
    for library in (cpu, emulated):
        for name in names:
            assert hasattr(library._dll, name), name


def test_wrong_ranges_are_errors_with_words(cpu: Library, emulated: Library) -> None:
    shard, state = new_shard(VARIANT), new_state(VARIANT)
    segments = Segments.build(NUMEL, SEGMENTS)
    (grad,) = gradients(VARIANT, 1)
    for library in (cpu, emulated):
        for chunks in (range(3, 5), range(-1, 1)):
            with pytest.raises(LibraryError, match="step: a size, range or pointer is wrong"):
                library.step(shard, grad, segments, state, chunks=chunks)
    wrong = step_args(shard, segments, state)
    wrong.main_kind = 9
    for library in (cpu, emulated):
        with pytest.raises(LibraryError, match="for this combination of kinds"):
            library.step_with(wrong, grad)


def test_filled_arguments_step_alike(cpu: Library) -> None:
    segments = Segments.build(NUMEL, SEGMENTS)
    shards = []
    for kept in (True, False):
        shard, state = new_shard(VARIANT), new_state(VARIANT)
        cpu.split_main(shard, initial())
        args = step_args(shard, segments, state)
        for grad in gradients(VARIANT, 4)[2:]:
            cpu.prepare(state, torch.ones(1, dtype=torch.float64), 0.0, None)
            if kept:
                cpu.step_with(args, grad)
            else:
                cpu.step(shard, grad, segments, state)
        shards.append(shard)
    assert shards[0].rest is not None
    assert shards[1].rest is not None
    assert equal_bits(shards[0].rest, shards[1].rest)


def test_probe(cpu: Library, emulated: Library) -> None:
    assert cpu.probe(0) is None
    assert emulated.probe(0) is None
    assert cpu.built_for in ("AVX-512", "AVX2", "baseline")


def test_a_shard_may_be_stepped_in_parts(cpu: Library, emulated: Library) -> None:
    segments = Segments.build(NUMEL, SEGMENTS)
    (grad,) = gradients(VARIANT, 1)
    results = []
    for library, parts in (
        (cpu, [range(4)]),
        (cpu, [range(2), range(2, 4)]),
        (emulated, [range(3, 4), range(3)]),
    ):
        shard, state = new_shard(VARIANT), new_state(VARIANT)
        library.split_main(shard, initial())
        library.prepare(state, torch.ones(1, dtype=torch.float64), 0.0, None)
        for part in parts:
            library.step(shard, grad, segments, state, chunks=part)
        assert shard.rest is not None
        results.append(shard.rest)
    assert equal_bits(results[0], results[1])
    assert equal_bits(results[0], results[2])


HUGE = 2**31 + 4 * CHUNK
"""Elements whose number, and whose bytes, need more than 32 bits."""


def sparse(dtype: torch.dtype, numel: int = HUGE) -> torch.Tensor:
    """Return zeros of which the system keeps only the pages that are written."""
    size = numel * torch.empty(0, dtype=dtype).element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # Linux: MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8).view(dtype)


def test_more_than_2_to_the_31_elements(cpu: Library, emulated: Library) -> None:
    # The last chunks of a huge shard, and the same elements as a small one.
    size = 4 * CHUNK
    begin = HUGE - size
    weights = initial(size)
    small, state = new_shard(VARIANT, size), new_state(VARIANT)
    table = Segments.build(
        size, [Segment(start=0, key=3, first=begin), Segment(start=CHUNK + BLOCK, group=1, key=4)]
    )
    (grad,) = gradients(VARIANT, 1, size)
    cpu.split_main(small, weights)
    cpu.prepare(state, torch.ones(1, dtype=torch.float64), 0.0, None)
    before = {name: getattr(small, name).clone() for name in ("weight", "rest")}
    cpu.step(small, grad, table, state)
    partials = torch.empty(4, dtype=torch.float64)
    cpu.sum_of_squares(grad, table, partials)

    whole = Segments(
        numel=HUGE,
        start=torch.tensor([0, begin + CHUNK + BLOCK]),
        group=table.group,
        norm_weight=table.norm_weight,
        key=table.key,
        first=torch.tensor([0, 0]),
        chunk_segment=sparse(torch.int32, chunks_of(HUGE)),
        inactive=False,
    )
    whole.chunk_segment[-2:] = 1
    chunks = range(chunks_of(begin), chunks_of(HUGE))
    for library in (cpu, emulated):
        huge_grad = sparse(torch.bfloat16)
        huge_grad[begin:] = grad
        shard = Shard(
            main=VARIANT.main,
            weight=sparse(torch.bfloat16),
            rest=sparse(torch.int8),
            exp_avg=sparse(torch.float8_e4m3fn),
            exp_avg_scale=sparse(torch.bfloat16, HUGE // BLOCK),
            exp_avg_sq=sparse(torch.uint8),
            exp_avg_sq_scale=sparse(torch.float32, HUGE // BLOCK),
        )
        assert shard.weight is not None
        assert shard.rest is not None
        shard.weight[begin:], shard.rest[begin:] = before["weight"], before["rest"]
        library.step(shard, huge_grad, whole, state, chunks=chunks)
        for name in ("weight", "rest", "exp_avg", "exp_avg_scale", "exp_avg_sq"):
            expected = getattr(small, name)
            found = getattr(shard, name)[-len(expected) :]
            assert equal_bits(found, expected), (library.path, name)
        huge_partials = sparse(torch.float64, chunks_of(HUGE))
        library.sum_of_squares(huge_grad, whole, huge_partials, chunks=chunks)
        assert equal_bits(huge_partials[-4:], partials)
