"""Every schedule of every size is complete and cannot hang."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.schedule import Kind, gpipe, one_f_one_b
from goose_strategy.pipeline_parallel.tables.catalogue import (
    CATALOGUE,
    finish,
    forward_only,
    make_schedule,
)
from goose_strategy.pipeline_parallel.tables.checks import check_messages, check_table
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.lowering import lower
from goose_strategy.pipeline_parallel.tables.peaks import peak_activations
from goose_strategy.pipeline_parallel.tables.simulate import draw


def chunk_counts(name: str) -> list[int]:
    entry = CATALOGUE[name]
    return [v for v in range(1, 5) if entry.least <= v <= (entry.most or v)]


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_no_table_up_to_8_ranks_16_microbatches_and_4_chunks_hangs(name: str) -> None:
    tables = 0
    for ranks in range(1, 9):
        for microbatches in range(1, 17):
            for per_rank in chunk_counts(name):
                extras = (ranks + microbatches + per_rank) % 2 == 0
                schedule = make_schedule.__wrapped__(name, ranks, microbatches, per_rank=per_rank)
                finish(schedule, recompute=extras, tie=extras)
                tables += 1
    assert tables == 128 * len(chunk_counts(name))


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_forwards_alone_do_not_hang(name: str) -> None:
    for ranks, microbatches in ((1, 1), (2, 3), (4, 9), (7, 4)):
        schedule = make_schedule(name, ranks, microbatches, train=False)
        table = finish(schedule, train=False)
        forwards = [a for row in table for a in row if a.kind is Kind.FORWARD]
        assert len(forwards) == schedule.chunks.stages * microbatches
        assert not any(a.kind in (Kind.BACKWARD, Kind.RECEIVE_BACKWARD) for r in table for a in r)


# The most activations on any rank, in chunks, for p ranks, v chunks, many microbatches.
MOST = {
    "GPipe": lambda p, v, m: m,
    "1F1B": lambda p, v, m: p,
    "Interleaved1F1B": lambda p, v, m: (v - 1) * p + 2 * (p - 1) + 1,
    "LoopedBFS": lambda p, v, m: v * m,
    "ZBH1": lambda p, v, m: p,
    "InterleavedZeroBubble": lambda p, v, m: v * p,
    "ZBVZeroBubble": lambda p, v, m: 2 * p,
    "DualPipeV": lambda p, v, m: 2 * p + 1,
    "VHalf": lambda p, v, m: 2 * ((p + 2) // 2),
    "VMin": lambda p, v, m: 2 * ((p + 4) // 3),
}


@pytest.mark.parametrize("name", list(CATALOGUE))
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_a_rank_holds_at_most(name: str, ranks: int) -> None:
    for per_rank in chunk_counts(name):
        for rounds in (2, 4):
            schedule = make_schedule(name, ranks, rounds * ranks, per_rank=per_rank)
            peak = max(peak_activations(schedule.table))
            assert peak <= MOST[name](ranks, per_rank, rounds * ranks)
            if rounds == 4:
                assert peak == MOST[name](ranks, per_rank, rounds * ranks)


def test_a_split_backward_is_announced() -> None:
    for name, entry in CATALOGUE.items():
        kinds = {a.kind for row in make_schedule(name, 3, 4).table for a in row}
        assert (Kind.INPUT in kinds) == entry.splits
        assert (Kind.WEIGHT in kinds) == entry.splits


def test_dualpipev_knows_its_pairs() -> None:
    assert make_schedule("DualPipeV", 2, 4).overlapped
    assert not make_schedule("DualPipeV", 2, 4, train=False).overlapped
    assert not make_schedule("VHalf", 2, 4).overlapped


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Gpipe", 2, 2, None), "schedule='Gpipe' is not known; choose one of 'GPipe', '1F1B'"),
        (("GPipe", 0, 2, None), "ranks=0 must be greater than 0"),
        (("GPipe", 2, 2.5, None), "microbatches=2.5 must be a whole number"),
        (("1F1B", 2, 2, 2), "per_rank=2 is not possible with schedule='1F1B'; choose per_rank 1,"),
        (("Interleaved1F1B", 2, 2, 1), "per_rank=1 is not possible .* choose per_rank >= 2,"),
        (("VMin", 2, 2, 3), "per_rank=3 is not possible with schedule='VMin'; choose per_rank 2,"),
    ],
)
def test_wrong_numbers_are_refused(arguments: tuple[str, int, int, int], message: str) -> None:
    name, ranks, microbatches, per_rank = arguments
    with pytest.raises(ConfigError, match=message):
        make_schedule(name, ranks, microbatches, per_rank=per_rank)


def test_the_classic_schedules_have_one_stage_per_rank_and_are_not_split() -> None:
    for name, make in (("GPipe", gpipe), ("1F1B", one_f_one_b)):
        entry = CATALOGUE[name]
        assert (entry.most, entry.splits) == (1, False)
        assert make_schedule(name, 3, 5).table == make(3, 5)


def test_evaluation_is_breadth_first_and_complete() -> None:
    assert draw(forward_only(Chunks(3), 3)) == "F0 F1 F2 .. ..\n.. F0 F1 F2 ..\n.. .. F0 F1 F2"
    for chunks in (Chunks(2, 3), Chunks(3, 2, "v")):
        for microbatches in range(1, 6):
            table = forward_only(chunks, microbatches)
            check_table(table, microbatches, chunks=chunks, train=False)
            check_messages(lower(table, chunks), chunks)


def test_the_readme_lists_every_schedule() -> None:
    page = Path(__file__).parents[3] / "goose_strategy/pipeline_parallel/README.md"
    listed = re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert set(CATALOGUE) <= set(listed)
