"""Crossings hold tensors and memory for as long as copies need them, and no longer."""

import torch

from goose_strategy.comm.crossing import Crossing
from tests.harness.streams import FakeLane


def test_tensors_are_held_until_they_have_arrived():
    lane = FakeLane("late")
    crossing = Crossing(lane)
    tensor = torch.arange(4.0)
    memory = crossing.like(tensor)
    crossing.fetch(tensor, memory)
    del tensor
    assert memory.isnan().all()
    crossing.arrive()
    assert memory.tolist() == [0, 1, 2, 3]


def test_memory_goes_back_when_its_copies_are_over():
    lane = FakeLane("late")
    crossing = Crossing(lane)
    target = torch.zeros(2, 3)
    memory = crossing.like(target).fill_(4)
    crossing.expect(memory, target)
    crossing.deliver()
    other = lane.pool.take(24)
    assert other.data_ptr() != memory.data_ptr()
    assert target.tolist() == [[0.0] * 3] * 2
    crossing.join()
    assert target.tolist() == [[4.0] * 3] * 2
    assert lane.pool.take(24).data_ptr() == memory.data_ptr()


def test_what_only_goes_down_is_not_copied_back():
    lane = FakeLane("late")
    crossing = Crossing(lane)
    tensor = torch.ones(3)
    memory = crossing.like(tensor)
    crossing.fetch(tensor, memory)
    crossing.arrive()
    crossing.deliver()
    crossing.join()
    assert lane.copies == 1
    assert lane.pool.take(12).data_ptr() == memory.data_ptr()
