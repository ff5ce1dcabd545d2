"""The table says who has what, and how even that is."""

from __future__ import annotations

from goose_strategy.pipeline_parallel.report import PartitionReport, StageFigures
from goose_strategy.pipeline_parallel.tables.chunks import Chunks


def test_a_table() -> None:
    stages = (
        StageFigures(0, 0, range(3), 12_345, 0.2, 2_500_000, 2**20, 3 * 2**20),
        StageFigures(1, 1, range(3, 5), 1000, 0.35, 4_000_000, 2**20, 0),
        StageFigures(2, 1, range(5, 6), 10, 0.25, None, 2**30, None),
        StageFigures(3, 0, range(6, 7), 10, 0.2, None, 2**30, None),
    )
    report = PartitionReport("ZBVZeroBubble", "time", Chunks(2, 2, "v"), stages, "the choice")
    assert report.imbalance == 0.6 * 2
    first, head, names, *lines = str(report).splitlines()
    assert first == "the choice"
    assert head == (
        "schedule='ZBVZeroBubble' with 4 stages on 2 ranks, partition='time': the busiest rank has "
        "1.200 times the mean"
    )
    assert names.split() == [
        "stage",
        "rank",
        "layers",
        "parameters",
        "work",
        "time",
        "resident",
        "activations",
    ]
    assert lines[0].split() == [
        "0",
        "0",
        "0-2",
        "12,345",
        "20.0%",
        "2.50",
        "ms",
        "1.0",
        "MiB",
        "3.0",
        "MiB",
    ]
    assert lines[2].split() == ["2", "1", "5-5", "10", "25.0%", "-", "1,024.0", "MiB", "-"]
    assert len(lines) == 4


def test_a_list_is_shown_as_it_was_given() -> None:
    stages = (StageFigures(0, 0, range(3), 1, 1.0, None, 1, None),)
    assert "partition=[3]" in str(PartitionReport("1F1B", [3], Chunks(1), stages))
