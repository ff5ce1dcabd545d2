from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cuda_ops.layout import (
    Main,
    Moment,
    Segment,
    Segments,
    Shard,
    chunks_of,
    moment_kind,
    rounding_key,
)


@pytest.mark.parametrize(
    ("numel", "segments", "words"),
    [
        (100, [Segment(start=0)], "numel=100: .* a multiple of 64"),
        (64, [], "numel=64 with 0 segments"),
        (0, [Segment(start=0)], "numel=0 with 1 segments"),
        (128, [Segment(start=64)], r"segments\[0\].start=64: the first one starts at 0"),
        (256, [Segment(start=0), Segment(start=100)], r"segments\[1\].start=100: .* multiples"),
        (256, [Segment(start=0), Segment(start=0)], r"segments\[1\].start=0"),
        (256, [Segment(start=0), Segment(start=256)], r"segments\[1\].start=256: .* below 256"),
        (64, [Segment(start=0, first=4)], r"segments\[0\].first=4: not a multiple of 8"),
    ],
)
def test_wrong_tables_are_refused(numel: int, segments: list[Segment], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Segments.build(numel, segments)


def test_chunks_know_their_first_segment() -> None:
    starts = [0, 64, 2048, 4096 + 64, 4096 + 128]
    table = Segments.build(3 * 2048, [Segment(start=s) for s in starts])
    assert table.chunk_segment.tolist() == [0, 2, 2]
    assert chunks_of(3 * 2048) == 3
    assert chunks_of(3 * 2048 + 64) == 4
    assert chunks_of(0) == 0


def test_a_rank_that_owns_nothing_has_an_empty_table() -> None:
    table = Segments.build(0, [])
    assert table.chunk_segment.numel() == 0
    assert not table.inactive


def test_keys_of_64_bits_keep_their_bits() -> None:
    table = Segments.build(64, [Segment(start=0, key=0xFEDCBA9876543210)])
    assert int(table.key[0]) & (2**64 - 1) == 0xFEDCBA9876543210


def test_keys_depend_on_name_and_slice_only() -> None:
    names = {rounding_key("a"), rounding_key("b"), rounding_key("a", 0), rounding_key("a", 1)}
    assert len(names) == 4
    assert rounding_key("a") == rounding_key("a")
    # Stored in no file, but a resumed run must round like the one it continues.
    assert rounding_key("model.embed_tokens.weight", 3) == 0xB580E9237C8999FD


def shard() -> Shard:
    return Shard.allocate(128, main=Main.SPLIT8, exp_avg=Moment.BLOCK8, exp_avg_sq=Moment.BLOCK8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rest": torch.zeros(128, dtype=torch.int16)}, "rest has dtype torch.int16"),
        ({"rest": None}, "rest has dtype None"),
        ({"rest": torch.zeros(64, dtype=torch.int8)}, r"rest has shape \(64,\); \(128,\)"),
        ({"weight": None}, "main=bf16\\+8 needs the bf16 weights"),
        ({"weight": torch.zeros(100, dtype=torch.bfloat16)}, "a shard of 100 elements"),
        ({"exp_avg": torch.zeros(128)}, "exp_avg_scale has dtype torch.bfloat16"),
        ({"exp_avg": torch.zeros(128, dtype=torch.uint8)}, "exp_avg has dtype torch.uint8"),
        ({"exp_avg_sq_scale": None}, "exp_avg_sq_scale has dtype None"),
        ({"exp_avg_sq_scale": torch.zeros(3)}, r"exp_avg_sq_scale has shape \(3,\); \(2,\)"),
        ({"exp_avg_sq": torch.zeros(256, dtype=torch.uint8)[::2]}, "exp_avg_sq has shape .* dense"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(shard(), **change)


@pytest.mark.parametrize(
    ("main", "first", "second", "bytes_"),
    [
        (Main.FP32, Moment.FP32, Moment.FP32, 12.0),
        (Main.SPLIT16, Moment.BF16, Moment.BF16, 6.0),
        (Main.SPLIT8, Moment.BLOCK8, Moment.BLOCK8, 3 + 6 / 64),
        (Main.BF16, Moment.BLOCK8, Moment.BLOCK8, 2 + 6 / 64),
    ],
)
def test_bytes_of_state(main: Main, first: Moment, second: Moment, bytes_: float) -> None:
    made = Shard.allocate(6400, main=main, exp_avg=first, exp_avg_sq=second)
    names = ("rest", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
    held = sum(t.nbytes for name in names if (t := getattr(made, name)) is not None)
    assert held / 6400 == bytes_
    assert (made.first_moment, made.second_moment) == (first, second)
    assert made.device == torch.device("cpu")


def test_existing_tensors_are_taken() -> None:
    weight, rest = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    made = Shard.allocate(
        64, main=Main.FP32, exp_avg=Moment.NONE, exp_avg_sq=Moment.NONE, weight=weight, rest=rest
    )
    assert made.weight is weight
    assert made.rest is rest
    assert moment_kind(None) == Moment.NONE
