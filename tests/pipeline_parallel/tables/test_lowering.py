"""Messages: by hand, and what must hold of every table."""

from __future__ import annotations

from itertools import pairwise

import pytest

from goose_strategy.pipeline_parallel.schedule import Action, Kind
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE, finish, make_schedule
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.lowering import lower
from goose_strategy.pipeline_parallel.tables.simulate import time_table
from tests.pipeline_parallel.tables.torch_tables import rows_of

SENDS = {Kind.SEND_FORWARD: 1, Kind.SEND_BACKWARD: -1}
RECEIVES = {Kind.RECEIVE_FORWARD: -1, Kind.RECEIVE_BACKWARD: 1}
SIZES = [(1, 3), (2, 1), (2, 5), (3, 4), (4, 8), (5, 7)]


def test_a_loop_over_two_ranks() -> None:
    """Both directions of both kinds between the same two ranks."""
    assert finish(make_schedule("Interleaved1F1B", 2, 2)) == rows_of(
        "0F0 0SEND_F0 0F1 0SEND_F1 2RECV_F0 2RECV_F1 2F0 2SEND_F0 2F1 2SEND_F1 "
        "2RECV_B0 2B0 2SEND_B0 2RECV_B1 2B1 2SEND_B1 0RECV_B0 0RECV_B1 0B0 0B1",
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1 3RECV_F0 3RECV_F1 3F0 3B0 3SEND_B0 3F1 "
        "1RECV_B0 3B1 3SEND_B1 1RECV_B1 1B0 1SEND_B0 1B1 1SEND_B1",
    )


def test_a_v_hands_over_at_its_turn() -> None:
    assert lower(rows_of("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"), Chunks(2, 2, "v")) == rows_of(
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0",
    )


def test_one_rank_sends_nothing() -> None:
    schedule = make_schedule("Interleaved1F1B", 1, 3)
    assert lower(schedule.table, schedule.chunks) == schedule.table


@pytest.mark.parametrize("name", list(CATALOGUE))
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_every_boundary_between_ranks_has_both_ends(
    name: str, ranks: int, microbatches: int
) -> None:
    schedule = make_schedule(name, ranks, microbatches)
    chunks = schedule.chunks
    found = [a for row in finish(schedule) for a in row if a.kind in {**SENDS, **RECEIVES}]
    expected = {
        Action(stage + (step == 1), kind, mb)
        for stage in range(chunks.stages - 1)
        if not chunks.is_local(stage)
        for kind, step in (
            (Kind.SEND_FORWARD, 0),
            (Kind.RECEIVE_FORWARD, 1),
            (Kind.SEND_BACKWARD, 1),
            (Kind.RECEIVE_BACKWARD, 0),
        )
        for mb in range(microbatches)
    }
    assert len(found) == len(expected)
    assert set(found) == expected


@pytest.mark.parametrize("name", list(CATALOGUE))
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_the_computations_stay_in_order_and_sends_follow_them(
    name: str, ranks: int, microbatches: int
) -> None:
    schedule = make_schedule(name, ranks, microbatches)
    for bare, row in zip(schedule.table, finish(schedule), strict=True):
        assert tuple(a for a in row if a.kind not in {**SENDS, **RECEIVES}) == bare
        for before, action in pairwise(row):
            if action.kind in SENDS:
                assert before[::2] == action[::2]


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_two_ranks_launch_what_they_share_in_one_order(name: str) -> None:
    """Over both communicators together, so it holds for each, however they are made."""
    schedule = make_schedule(name, 4, 9)
    chunks = schedule.chunks
    between: dict[tuple[int, int], list[list[str]]] = {}
    for rank, row in enumerate(finish(schedule)):
        for action in row:
            step = SENDS.get(action.kind) or RECEIVES.get(action.kind)
            if step is None:
                continue
            peer = chunks.rank_of(action.stage + step)
            sender = action.stage if action.kind in SENDS else action.stage + step
            text = f"{action.kind.value[-1]} of {action.microbatch} from {sender}"
            pair = between.setdefault((min(rank, peer), max(rank, peer)), [[], []])
            pair[rank > peer].append(text)
    assert between
    for mine, theirs in between.values():
        assert mine == theirs


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_receives_are_posted_in_time_and_not_long_before(name: str) -> None:
    """Before or during the action in which the message is computed; the buffer starts there."""
    schedule = make_schedule(name, 4, 16)
    chunks = schedule.chunks
    spans = {
        span.action: span
        for row in time_table(schedule.table, chunks, unit_cost, 0.0)
        for span in row
    }
    checked = 0
    for row in finish(schedule):
        for position, action in enumerate(row):
            if action.kind not in RECEIVES:
                continue
            step = RECEIVES[action.kind]
            kinds = (Kind.FORWARD,) if step < 0 else (Kind.BACKWARD, Kind.INPUT)
            sources = (Action(action.stage + step, kind, action.microbatch) for kind in kinds)
            source = next(spans[source] for source in sources if source in spans)
            following = [spans[a] for a in row[position:] if a in spans]
            assert following[0].end >= source.end
            # Not behind an action that starts when the message is there.
            before = [spans[a] for a in row[:position] if a in spans]
            assert not before or before[-1].start < source.end
            checked += 1
    assert checked


def unit_cost(action: Action) -> float:
    return 2.0 if action.kind is Kind.BACKWARD else 1.0
