"""The stand-in for a device does things in every order that its events allow, and no other."""

import pytest
import torch

from tests.harness.streams import POISON, FakeLane


def test_late_work_waits_for_somebody_who_waits():
    lane = FakeLane("late")
    source, target = torch.ones(3), torch.zeros(3)
    lane.copy(target, source, lane.down)
    event = lane.record(lane.down)
    assert not event.query()
    assert target.tolist() == [0, 0, 0]
    source.fill_(2)  # nobody waited, so the copy sees it
    event.synchronize()
    assert target.tolist() == [2, 2, 2]
    assert event.query()


def test_early_work_is_done_before_anybody_can_look():
    lane = FakeLane("early")
    source, target = torch.ones(3), torch.zeros(3)
    lane.copy(target, source, lane.down)
    source.fill_(2)
    assert target.tolist() == [1, 1, 1]


@pytest.mark.parametrize("pace", ["late", "early"])
def test_a_stream_waits_for_another(pace):
    lane = FakeLane(pace, computing="late")
    source, target = torch.zeros(3), torch.zeros(3)
    lane.compute(lambda: source.fill_(7))
    lane.down.wait_event(lane.record(lane.current()))
    lane.copy(target, source, lane.down)
    lane.record(lane.down).synchronize()
    assert target.tolist() == [7, 7, 7]


def test_early_work_goes_on_when_what_it_waits_for_is_done():
    lane = FakeLane("early", computing="late")
    source, target = torch.zeros(3), torch.zeros(3)
    lane.compute(lambda: source.fill_(7))
    computed = lane.record(lane.current())
    lane.down.wait_event(computed)
    lane.copy(target, source, lane.down)
    assert target.tolist() == [0, 0, 0]
    computed.synchronize()
    assert target.tolist() == [7, 7, 7]


def test_memory_that_is_freed_too_soon_is_an_error():
    lane = FakeLane("late")
    target = torch.zeros(3)
    lane.copy(target, torch.ones(3), lane.down)
    with pytest.raises(AssertionError, match="freed before the copy was over"):
        lane.finish()


def test_fresh_memory_is_no_number():
    buffer = FakeLane().pool.take(10)
    assert set(buffer.tolist()) == {POISON}
    assert buffer[:8].view(torch.float32).isnan().all()
