"""Which rank holds which stages."""

from __future__ import annotations

import pytest

from goose_strategy.errors import ConfigError
from goose_strategy.pipeline_parallel.schedule import gpipe
from goose_strategy.pipeline_parallel.tables.chunks import Chunks, Schedule


def test_a_loop_goes_around() -> None:
    chunks = Chunks(3, 2)
    assert chunks.stages == 6
    assert chunks.holders == (0, 1, 2, 0, 1, 2)
    assert chunks.stages_of(1) == (1, 4)
    assert not any(chunks.is_local(stage) for stage in range(5))


def test_a_v_turns_back() -> None:
    chunks = Chunks(3, 2, "v")
    assert chunks.holders == (0, 1, 2, 2, 1, 0)
    assert chunks.stages_of(0) == (0, 5)
    assert [chunks.is_local(stage) for stage in range(5)] == [False, False, True, False, False]
    assert chunks.rank_of(4) == 1


def test_all_stages_of_one_rank_are_local() -> None:
    assert all(Chunks(1, 3).is_local(stage) for stage in range(2))


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"per_rank=3 does not fit style='v'.*choose per_rank=2"):
        Chunks(2, 3, "v")
    with pytest.raises(ConfigError, match="ranks=0 must be greater than 0"):
        Chunks(0)
    with pytest.raises(ConfigError, match=r"per_rank=1\.5 must be a whole number"):
        Chunks(2, 1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="style='w' is not known"):
        Chunks(2, 2, "w")  # type: ignore[arg-type]


def test_a_schedule_with_another_table_keeps_the_rest() -> None:
    schedule = Schedule("GPipe", Chunks(2), 3, gpipe(2, 3))
    other = schedule.with_table(())
    assert other.table == ()
    assert schedule.peaks == (3, 3)
    assert (other.name, other.chunks, other.microbatches) == ("GPipe", Chunks(2), 3)
