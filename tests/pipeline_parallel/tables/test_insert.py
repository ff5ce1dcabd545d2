"""Recomputes and ties stand where an engine can use them."""

from __future__ import annotations

import pytest

from goose_strategy.pipeline_parallel.schedule import MESSAGES, Action, Kind, gpipe, one_f_one_b
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE, finish, make_schedule
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.insert import add_recompute, add_tie
from goose_strategy.pipeline_parallel.tables.interleaved import looped_bfs
from goose_strategy.pipeline_parallel.tables.lowering import lower
from tests.pipeline_parallel.tables.torch_tables import rows_of

BACKWARDS = (Kind.BACKWARD, Kind.INPUT)


def test_by_hand() -> None:
    table = add_tie(add_recompute(one_f_one_b(2, 2)))
    assert table == rows_of("0F0 0F1 0R0 0B0 0R1 0B1 0T0", "1F0 1B0 1F1 1B1 1T0")


def test_with_messages() -> None:
    table = lower(add_tie(add_recompute(one_f_one_b(2, 2))), Chunks(2))
    assert table == rows_of(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0R0 0B0 0RECV_B1 0R1 0B1 0T0",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1T0",
    )


@pytest.mark.parametrize("name", list(CATALOGUE))
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 3), (4, 8), (5, 3)])
def test_before_or_after_the_messages_is_the_same(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_schedule(name, ranks, microbatches)
    chunks = schedule.chunks
    both = finish(schedule, recompute=True, tie=True)
    assert add_tie(add_recompute(lower(schedule.table, chunks)), chunks) == both


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_a_recompute_comes_after_its_receive_and_right_before_its_backward(name: str) -> None:
    schedule = make_schedule(name, 4, 8)
    chunks = schedule.chunks
    seen: list[Action] = []
    for row in finish(schedule, recompute=True):
        live: dict[int, int] = {}
        computed: Action | None = None
        for position, action in enumerate(row):
            if action.kind is Kind.RECOMPUTE:
                seen.append(action)
                assert action.stage not in live, "two recomputes of a stage wait"
                live[action.stage] = action.microbatch
                follower = row[position + 1]
                assert (follower.stage, follower.microbatch) == (action.stage, action.microbatch)
                assert follower.kind in BACKWARDS
                if action.stage < chunks.stages - 1 and not chunks.is_local(action.stage):
                    receive = action._replace(kind=Kind.RECEIVE_BACKWARD)
                    assert receive in row[:position]
            elif action.kind in BACKWARDS:
                at_once = computed == action._replace(kind=Kind.FORWARD)
                assert live.pop(action.stage, None) == (None if at_once else action.microbatch)
            computed = action if action.kind not in MESSAGES else computed
    assert len(set(seen)) == len(seen)
    every = {Action(s, Kind.RECOMPUTE, mb) for s in range(chunks.stages) for mb in range(8)}
    last = {action for action in every if action.stage == chunks.stages - 1}
    assert set(seen) >= every - last
    if name in ("1F1B", "ZBH1", "Interleaved1F1B"):
        assert not set(seen) & last
    if name in ("GPipe", "LoopedBFS"):
        assert set(seen) == every


def test_what_follows_at_once_is_not_recomputed() -> None:
    assert add_recompute(gpipe(2, 2)) == rows_of(
        "0F0 0F1 0R0 0B0 0R1 0B1", "1F0 1F1 1R0 1B0 1R1 1B1"
    )
    for make in (gpipe, one_f_one_b):
        assert add_recompute(make(3, 1)) == make(3, 1)


def test_where_one_rank_has_both_ends_nothing_is_tied() -> None:
    for name in ("ZBVZeroBubble", "VHalf"):
        schedule = make_schedule(name, 3, 4)
        assert add_tie(schedule.table, schedule.chunks) is schedule.table
    single = make_schedule("1F1B", 1, 2)
    assert add_tie(single.table) is single.table


def test_a_tie_may_come_long_before_the_other() -> None:
    """Breadth first, the last stage is done first. Nobody waits for a tie before the row's end."""
    first, last = finish(make_schedule("LoopedBFS", 2, 2), tie=True)
    assert str(first[-1]) == "0T0"
    assert list(map(str, last[-7:])) == [
        "3T0", "1RECV_B0", "1RECV_B1", "1B0", "1SEND_B0", "1B1", "1SEND_B1",
    ]  # fmt: skip
    assert add_tie(looped_bfs(2, 2, 2), Chunks(2, 2))[0][-1] == Action(0, Kind.TIE, 0)


def test_nothing_is_inserted_where_nothing_goes_back() -> None:
    schedule = make_schedule("1F1B", 3, 2, train=False)
    assert add_recompute(schedule.table) == schedule.table
    assert add_tie(schedule.table) == schedule.table
