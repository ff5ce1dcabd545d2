"""Programs do not deadlock, and the check finds the ones that would."""

from __future__ import annotations

from pathlib import Path

import pytest

from goose_strategy.errors import BatchError, ConfigError, ScheduleError
from goose_strategy.pipeline_parallel.program import (
    chunks_of,
    fingerprint,
    program,
    rank_program,
    splits_backward,
)
from goose_strategy.pipeline_parallel.schedule import Action, Kind, Table, gpipe, one_f_one_b
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE, make_schedule
from goose_strategy.pipeline_parallel.tables.checks import check_messages
from goose_strategy.pipeline_parallel.tables.chunks import Chunks
from goose_strategy.pipeline_parallel.tables.csv_text import write_csv
from goose_strategy.pipeline_parallel.tables.lowering import lower

CLASSIC = ["GPipe", "1F1B"]


def row(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(part) for part in text.split())


def show(actions: tuple[Action, ...]) -> str:
    return " ".join(map(str, actions))


def test_messages_of_1f1b() -> None:
    first, middle, last = program("1F1B", 3, 3)
    assert show(first) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2"
    )
    assert show(middle) == (
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_F2 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 "
        "1F2 1SEND_F2 1RECV_B1 1B1 1SEND_B1 1RECV_B2 1B2 1SEND_B2"
    )
    assert show(last) == (
        "2RECV_F0 2RECV_F1 2F0 2B0 2SEND_B0 2F1 2RECV_F2 2B1 2SEND_B1 2F2 2B2 2SEND_B2"
    )


def test_forward_only_has_no_gradients() -> None:
    assert show(program("GPipe", 2, 2, train=False)[1]) == "1RECV_F0 1RECV_F1 1F0 1F1"


@pytest.mark.parametrize("schedule", CLASSIC)
def test_no_program_deadlocks(schedule: str) -> None:
    for stages in range(1, 9):
        for microbatches in range(1, 17):
            for train, recompute in ((True, False), (True, True), (False, False)):
                program.__wrapped__(
                    schedule, stages, microbatches, train=train, recompute=recompute
                )


@pytest.mark.parametrize("schedule", CLASSIC)
def test_a_recompute_stands_between_the_receive_and_its_use(schedule: str) -> None:
    for stage, actions in enumerate(program(schedule, 4, 8, recompute=True)):
        again = [action for action in actions if action.kind is Kind.RECOMPUTE]
        # The messages are those of a program without.
        assert tuple(a for a in actions if a not in again) == program(schedule, 4, 8)[stage]
        late = stage < 3 or schedule == "GPipe"
        assert [a.microbatch for a in again] == (list(range(8)) if late else [])
        for action in again:
            position = actions.index(action)
            assert actions[position + 1] == action._replace(kind=Kind.BACKWARD)
            assert stage == 3 or action._replace(kind=Kind.RECEIVE_BACKWARD) in actions[:position]
        row = rank_program(schedule, 4, 8, train=True, rank=stage, recompute=True)
        assert row.recomputed == {(stage, action.microbatch) for action in again}
        assert not rank_program(schedule, 4, 8, train=True, rank=stage).recomputed


@pytest.mark.parametrize("schedule", CLASSIC)
def test_at_most_one_receive_is_ahead_of_the_computation(schedule: str) -> None:
    for actions in program(schedule, 4, 8):
        for post, use in (
            (Kind.RECEIVE_FORWARD, Kind.FORWARD),
            (Kind.RECEIVE_BACKWARD, Kind.BACKWARD),
        ):
            posted = [a.microbatch for a in actions if a.kind is post]
            if not posted:
                continue
            waiting = most = 0
            for action in actions:
                waiting += {post: 1, use: -1}.get(action.kind, 0)
                most = max(most, waiting)
            assert most <= 2


def test_receives_far_ahead_would_deadlock() -> None:
    """The reason why receives are posted one action ahead and not two."""

    def early(table: Table) -> Table:
        rows = []
        for actions in lower(table, Chunks(len(table))):
            posts = [a for a in actions if a.kind is Kind.RECEIVE_FORWARD]
            rest = [a for a in actions if a.kind is not Kind.RECEIVE_FORWARD]
            rows.append((*posts, *rest))
        return tuple(rows)

    with pytest.raises(ScheduleError, match="The schedule deadlocks"):
        check_messages(early(one_f_one_b(4, 8)))


def test_a_lost_message_is_found() -> None:
    first, second = lower(gpipe(2, 1), Chunks(2))
    lost = tuple(action for action in first if action.kind is not Kind.SEND_FORWARD)
    with pytest.raises(ScheduleError, match=r"stages wait at \['0B0', '1F0'\]"):
        check_messages((lost, second))


def test_messages_of_different_microbatches_may_not_meet() -> None:
    table = (row("0F0 0SEND_F0 0F1 0SEND_F1"), row("1RECV_F1 1F1 1RECV_F0 1F0"))
    with pytest.raises(ScheduleError, match=r"0SEND_F0 meets 1RECV_F1: not the same microbatch"):
        check_messages(table)


def test_an_unreceived_message_is_found() -> None:
    with pytest.raises(ScheduleError, match=r"messages \['0SEND_F0'\] not matched"):
        check_messages((row("0F0 0SEND_F0"), row("1F0")))


@pytest.mark.parametrize("schedule", CLASSIC)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (3, 3), (4, 8)])
def test_a_send_is_only_called_taken_when_it_was(
    schedule: str, stages: int, microbatches: int
) -> None:
    """Each claim is checked against the row of the neighbour that took the message."""
    table = program(schedule, stages, microbatches)
    for stage in range(stages):
        mine = rank_program(schedule, stages, microbatches, train=True, rank=stage)
        claimed = [send for sends in mine.taken.values() for send in sends]
        assert len(set(claimed)) == len(claimed)
        for trigger, sends in mine.taken.items():
            for send in sends:
                assert mine.actions.index(send) < mine.actions.index(trigger)
                forward = trigger.kind is Kind.FORWARD
                peer = table[stage - 1 if forward else stage + 1]
                used = Action(
                    stage - 1 if forward else stage + 1,
                    Kind.BACKWARD if forward else Kind.FORWARD,
                    send.microbatch,
                )
                answer = Action(
                    used.stage,
                    Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD,
                    trigger.microbatch,
                )
                assert peer.index(used) < peer.index(answer)


def test_1f1b_holds_few_sent_tensors() -> None:
    for stage in range(4):
        mine = rank_program("1F1B", 4, 32, train=True, rank=stage)
        held = most = 0
        for action in mine.actions:
            held += action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
            held -= len(mine.taken.get(action, ()))
            most = max(most, held)
        assert most <= 8


def test_what_completes_gradients_is_known() -> None:
    def completes(schedule: str, rank: int, *, train: bool = True) -> str:
        return show(tuple(sorted(rank_program(schedule, 2, 3, train=train, rank=rank).completes)))

    assert completes("1F1B", 0) == "0B2"
    assert completes("1F1B", 0, train=False) == ""
    assert completes("Interleaved1F1B", 1) == "1B2 3B2"
    # What a layer does not put off is complete with the last I.
    assert completes("ZBH1", 0) == "0I2 0W2"
    assert completes("ZBVZeroBubble", 0) == "0I2 0W2 3I2 3W2"


def test_a_file_is_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    path.write_text(write_csv(make_schedule("ZBVZeroBubble", 2, 5)), encoding="utf-8")
    chunks = chunks_of(str(path), 2)
    assert chunks == Chunks(2, 2, "v")
    assert splits_backward(str(path))
    other = tmp_path / "other.csv"
    # As a spreadsheet saves it.
    other.write_text("\ufeff" + write_csv(make_schedule("ZBVZeroBubble", 2, 4)), encoding="utf-8")
    assert fingerprint(str(path)) != fingerprint(str(other))
    assert fingerprint("1F1B") == "1F1B"
    assert program(str(path), chunks, 5) == program("ZBVZeroBubble", chunks, 5)
    with pytest.raises(BatchError, match="is for 5 microbatches, but the batch gives 4"):
        program(str(path), chunks, 4)
    # Evaluation takes any number.
    forwards = program(str(path), chunks, 3, train=False)
    assert sum(action.kind is Kind.FORWARD for row in forwards for action in row) == 4 * 3


@pytest.mark.parametrize("schedule", list(CATALOGUE))
def test_a_send_is_taken_before_what_comes_of_it(schedule: str) -> None:
    """Replay the rows: at each claim, the other rank has waited for the message."""
    chunks = chunks_of(schedule, 4)
    table = program(schedule, chunks, 8)
    for rank in range(4):
        mine = rank_program(schedule, chunks, 8, train=True, rank=rank)
        claimed = [send for sends in mine.taken.values() for send in sends]
        assert len(set(claimed)) == len(claimed)
        for trigger, sends in mine.taken.items():
            source = trigger.stage - 1 if trigger.kind is Kind.FORWARD else trigger.stage + 1
            theirs = table[chunks.rank_of(source)]
            kind = Kind.SEND_FORWARD if trigger.kind is Kind.FORWARD else Kind.SEND_BACKWARD
            sent = theirs.index(Action(source, kind, trigger.microbatch))
            for send in sends:
                assert mine.actions.index(send) < mine.actions.index(trigger)
                forward = send.kind is Kind.SEND_FORWARD
                user = send.stage + 1 if forward else send.stage - 1
                kinds = [Kind.FORWARD] if forward else [Kind.BACKWARD, Kind.INPUT]
                used = [a for a in (Action(user, k, send.microbatch) for k in kinds) if a in theirs]
                assert theirs.index(used[0]) < sent


def test_unknown_names_and_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="schedule='DualPipe' is not known"):
        program("DualPipe", 2, 2)
    with pytest.raises(ConfigError, match="microbatches=0 must be greater than 0"):
        program("1F1B", 2, 0)
