"""The CSV is torch's: it reads ours, and we read its."""

from __future__ import annotations

from pathlib import Path

import pytest

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.schedule import Action
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE, make_schedule
from goose_strategy.pipeline_parallel.tables.csv_text import read_csv, write_csv
from goose_strategy.pipeline_parallel.tables.insert import add_recompute, add_tie
from tests.pipeline_parallel.tables.torch_tables import torch_runner, torch_table

# Name in torch, stages per rank.
IN_TORCH = {
    "GPipe": ("ScheduleInterleaved1F1B", 1),
    "Interleaved1F1B": ("ScheduleInterleaved1F1B", 2),
    "LoopedBFS": ("ScheduleLoopedBFS", 2),
    "InterleavedZeroBubble": ("ScheduleInterleavedZeroBubble", 2),
    "ZBVZeroBubble": ("ScheduleZBVZeroBubble", 2),
    "DualPipeV": ("ScheduleDualPipeV", 2),
}


@pytest.mark.parametrize("name", list(CATALOGUE))
@pytest.mark.parametrize("microbatches", [1, 5, 8])
def test_round_trip(name: str, microbatches: int) -> None:
    schedule = make_schedule(name, 3, microbatches)
    again = read_csv(write_csv(schedule), name=name)
    assert again == schedule


@pytest.mark.parametrize("name", list(IN_TORCH))
def test_torch_reads_what_is_written(name: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, 4, 8)
    file = tmp_path / "schedule.csv"
    file.write_text(write_csv(schedule), encoding="utf-8")
    runner = torch_runner(*_arguments(name))
    runner._load_csv(str(file))
    flat = {
        rank: [str(part) for action in row if action for part in (action.sub_actions or (action,))]
        for rank, row in runner.pipeline_order.items()
    }
    for rank, row in enumerate(schedule.table):
        assert flat[rank] == [str(action) for action in row]
    pairs = [a for row in runner.pipeline_order.values() for a in row if a and a.sub_actions]
    assert {Action.parse(str(p.sub_actions[0])) for p in pairs} == schedule.overlapped


@pytest.mark.parametrize("name", [name for name in IN_TORCH if name != "GPipe"])
def test_what_torch_writes_is_read(name: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    torch_runner(*_arguments(name))._dump_csv(str(file), format="compute_only")
    schedule = read_csv(file.read_text(encoding="utf-8"), name=str(file))
    assert schedule.table == torch_table(*_arguments(name))
    assert schedule.chunks == make_schedule(name, 4, 8).chunks
    assert schedule.microbatches == 8
    assert schedule.overlapped == make_schedule(name, 4, 8).overlapped


def _arguments(name: str) -> tuple[str, int, int, int]:
    theirs, per_rank = IN_TORCH[name]
    return theirs, 4, per_rank, 8


def test_pairs_by_hand() -> None:
    text = "0F0,,(0F1; 1B0)OVERLAP_F_B\n"
    with pytest.raises(ConfigError, match="0B0 is missing"):
        read_csv(text)
    text = "0F0,1F0,(0F1; 1B0)OVERLAP_F_B,0B0,,1F1,1B1,0B1\n"
    schedule = read_csv(text)
    assert schedule.overlapped == {Action.parse("0F1")}
    assert write_csv(schedule) == "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1\n"


def test_recomputes_and_ties_are_written_too() -> None:
    schedule = make_schedule("1F1B", 2, 2)
    more = schedule.with_table(add_tie(add_recompute(schedule.table)))
    text = write_csv(more)
    assert text == "0F0,0F1,0R0,0B0,0R1,0B1,0T0\n1F0,1B0,1F1,1B1,1T0\n"
    assert read_csv(text, name="1F1B") == more


def test_a_pair_with_a_recompute_in_it_is_written_apart() -> None:
    schedule = make_schedule("DualPipeV", 2, 4)
    more = schedule.with_table(add_recompute(schedule.table))
    assert read_csv(write_csv(more)).table == more.table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "CSV has no actions"),
        ("0F0,0B0\n1F0,1X0\n", r"CSV, line 2: action='1X0' is not of the form"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "line 1: 0SEND_F0 is a message; leave messages out"),
        ("0F0,(0B0;0F1)OVERLAP_F_B\n", r"line 1: \(0B0;0F1\)OVERLAP_F_B must overlap an F with"),
        ("0F0,0UNSHARD\n", "action='0UNSHARD' is not of the form"),
        ("0F0,0B0\n1F0\n", "CSV: 1B0 is missing"),
        ("0F0,2F0,2B0,0B0\n1F0,1B0\n", "CSV has 3 stages on 2 ranks"),
        ("1F0,1B0\n0F0,0B0\n", r"CSV has stage 0 on rank 1; stage s belongs on rank s % 2"),
        ("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n", r"stage 1 on rank 0.*, or on rank 3 - s from s = 2"),
        ("0F0,0B0\n1F0,1B0\n1F1\n", "CSV has 2 stages on 3 ranks"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_csv(text)
