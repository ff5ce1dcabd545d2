"""Wrong tables are refused, and the first wrong action is named."""

from __future__ import annotations

import random

import pytest

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.schedule import MESSAGES, Action, Kind, Table, gpipe
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE, finish, make_schedule
from goose_strategy.pipeline_parallel.tables.checks import (
    check_messages,
    check_schedule,
    check_table,
)
from goose_strategy.pipeline_parallel.tables.chunks import Chunks, Schedule
from tests.pipeline_parallel.tables.random_turns import RandomTurns
from tests.pipeline_parallel.tables.torch_tables import rows_of


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0B0", "1F0 1F0 1B0"), r"stage 1 runs F for microbatches \[0, 0\]"),
        (("0F0 0B0", "1F0"), r"1B0 is missing: stage 1 runs B for microbatches \[\]"),
        (("0B0", "1F0 1B0"), r"0F0 is missing"),
        (("0B0 0F0", "1F0 1B0"), "0B0 comes before 0F0"),
        (("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"), r"takes F in the order \[1, 0\], stage 0 in"),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B1 1B0"), r"takes B in the order \[1, 0\], stage 0 in"),
        (("0F0 1B0", "1F0 1B0"), "1B0 does not belong into row 0"),
        (("0F0 0SEND_F0 0B0", "1F0 1B0"), "0SEND_F0 does not belong into row 0"),
        (("0F0 0F7 0B0", "1F0 1B0"), "0F7 is one too many"),
        (("0F0 0I0", "1F0 1B0"), "0W0 is missing"),
        (("0F0 0W0", "1F0 1B0"), "0I0 is missing"),
        (("0F0 0W0 0I0", "1F0 1B0"), "0W0 comes before 0I0"),
        (("0F0 0B0 0W0", "1F0 1B0"), "0W0 has no 0I0 before it, but a B"),
        (("0F0 0B0 0I0 0W0", "1F0 1B0"), "0B0 does what 0I0 has done"),
        (("0R0 0F0 0B0", "1F0 1B0"), "0R0 comes before 0F0"),
        (("0F0 0R0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), "0R0 must stand right before its backward"),
        (("0F0 0B0 0T0", "1F0 1B0"), r"stages \[0\] tie weights; the first and the last one do"),
        (("0F0 0T0 0B0", "1F0 1B0 1T0"), "0B0 comes after 0T0"),
        (("0F0 0T1 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"), "0T1: only 0T0 and 1T0 tie weights"),
    ],
)
def test_a_wrong_table_is_refused(rows: tuple[str, ...], message: str) -> None:
    microbatches = 2 if "0F1" in rows[0] else 1
    with pytest.raises(ScheduleError, match=message):
        check_table(rows_of(*rows), microbatches)


def test_a_table_without_training_has_no_backwards() -> None:
    check_table(rows_of("0F0", "1F0"), 1, train=False)
    with pytest.raises(ScheduleError, match="stage 0 has backwards in a table without training"):
        check_table(gpipe(2, 1), 1, train=False)


def test_a_stage_on_the_wrong_rank_is_refused() -> None:
    table = make_schedule("ZBVZeroBubble", 2, 2).table
    with pytest.raises(ScheduleError, match="3F0 does not belong into row 0"):
        check_table(table, 2, chunks=Chunks(2, 2))
    with pytest.raises(ScheduleError, match="a table of 2 rows is not one of 3 ranks"):
        check_table(table, 2, chunks=Chunks(3, 2))


def test_a_dropped_weight_gradient_is_found() -> None:
    schedule = make_schedule("VHalf", 3, 4)
    lost = Action(4, Kind.WEIGHT, 2)
    table = tuple(tuple(a for a in row if a != lost) for row in schedule.table)
    with pytest.raises(ScheduleError, match=r"VHalf: 4W2 is missing: stage 4 runs W for .*0, 1, 3"):
        check_schedule(schedule.with_table(table))


def test_ties_of_one_rank_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"stages \[0, 3\] tie weights"):
        check_schedule(
            Schedule(
                "X",
                Chunks(2, 2, "v"),
                1,
                rows_of("0F0 3F0 3B0 3T0 0B0 0T0", "1F0 2F0 2B0 1B0"),
            )
        )


LOOP = (
    "0F0 0SEND_F0 2RECV_F0 2F0 2SEND_F0 2RECV_B0 2B0 2SEND_B0 0RECV_B0 0B0",
    "1RECV_F0 1F0 1SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 1RECV_B0 1B0 1SEND_B0",
)


def test_a_send_behind_a_receive_that_waits_for_it_deadlocks() -> None:
    check_messages(rows_of(*LOOP), Chunks(2, 2))
    first = LOOP[0].replace("0SEND_F0 2RECV_F0", "2RECV_F0 0SEND_F0")
    with pytest.raises(ScheduleError, match=r"stages wait at \['2F0', '1F0'\], with messages"):
        check_messages(rows_of(first, LOOP[1]), Chunks(2, 2))


def test_a_communicator_works_in_order_whoever_the_peers_are() -> None:
    """Rank 1's send to rank 2 stands behind a receive from rank 0, which waits for rank 2."""
    rows = (
        "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1RECV_B0 1B0 1SEND_B0 1F1 1SEND_F1 1RECV_B1 1B1 1SEND_B1",
        "2RECV_F0 2F0 2B0 2SEND_B0 2RECV_F1 2F1 2B1 2SEND_B1",
    )
    check_messages(rows_of(*rows))
    middle = rows[1].replace("1SEND_F0 1RECV_F1", "1RECV_F1 1SEND_F0")
    with pytest.raises(ScheduleError, match=r"stages wait at \['0B0', '1B0', '2F0'\]"):
        check_messages(rows_of(rows[0], middle, rows[2]))


def test_swapped_receives_are_found() -> None:
    table = finish(make_schedule("Interleaved1F1B", 2, 2))
    swap = {"1RECV_F0": "1RECV_F1", "1RECV_F1": "1RECV_F0"}
    rows = [" ".join(swap.get(str(a), str(a)) for a in row) for row in table]
    with pytest.raises(ScheduleError, match="0SEND_F0 meets 1RECV_F1: not the same microbatch"):
        check_messages(rows_of(*rows), Chunks(2, 2))


def test_messages_of_other_stages_may_not_meet() -> None:
    table = ("0F0 0SEND_F0 2RECV_F0 2F0", "3RECV_F0 1RECV_F0 1F0 1SEND_F0 3F0")
    with pytest.raises(ScheduleError, match="0SEND_F0 meets 3RECV_F0: not the same stages"):
        check_messages(rows_of(*table), Chunks(2, 2))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0SEND_F0 0F0", "1RECV_F0 1F0"), "0SEND_F0 comes before what it needs was computed"),
        (("0RECV_B0 0F0 0B0", "1F0"), "0RECV_B0 comes before what it needs was computed"),
        (("0F0 0SEND_F0", "1RECV_F0 1F0 1SEND_B0 1B0"), "1SEND_B0 comes before what it needs"),
        (("0F0 0SEND_F0", "1RECV_F0 1F0 1SEND_F0"), "1SEND_F0 comes before there is another rank"),
        (("0F0 0SEND_F0", "1F0"), r"messages \['0SEND_F0'\] not matched"),
        (("0F0 0T0", "1F0"), r"messages \['0T0'\] not matched"),
    ],
)
def test_wrong_messages_are_refused(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_messages(rows_of(*rows))


def test_a_message_between_stages_of_a_rank_is_refused() -> None:
    with pytest.raises(ScheduleError, match="0SEND_F0 comes before there is another rank"):
        check_messages(rows_of("0F0 0SEND_F0 1F0"), Chunks(1, 2))


def check_all(schedule: Schedule, table: Table) -> None:
    bare = tuple(tuple(a for a in row if a.kind not in MESSAGES) for row in table)
    check_schedule(schedule.with_table(bare))
    check_messages(table, schedule.chunks)


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_every_single_action_is_needed_once(name: str) -> None:
    schedule = make_schedule(name, 3, 3)
    table = finish(schedule, recompute=True, tie=True)
    check_all(schedule, table)
    for rank, row in enumerate(table):
        for at, action in enumerate(row):
            for changed in (row[:at] + row[at + 1 :], (*row[: at + 1], action, *row[at + 1 :])):
                if len(changed) < len(row) and action.kind is Kind.RECOMPUTE:
                    continue  # Without it the backward finds what the forward kept.
                with pytest.raises(ScheduleError):
                    check_all(schedule, (*table[:rank], changed, *table[rank + 1 :]))


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_swaps_are_refused_or_harmless(name: str) -> None:
    """What passes the check runs to its end in any order in which the ranks take turns."""
    schedule = make_schedule(name, 3, 3)
    table = finish(schedule)
    chance = random.Random(0)
    refused = 0
    for _ in range(150):
        rank = chance.randrange(len(table))
        row = list(table[rank])
        one, two = sorted(chance.sample(range(len(row)), 2))
        row[one], row[two] = row[two], row[one]
        changed = (*table[:rank], tuple(row), *table[rank + 1 :])
        try:
            check_all(schedule, changed)
        except ScheduleError:
            refused += 1
        else:
            assert RandomTurns(changed, schedule.chunks, chance).finishes()
    assert refused > 75
