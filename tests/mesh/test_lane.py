"""Pinned memory that is used again, which groups need a lane, and the lane of a card."""

from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from goose_strategy.mesh.host import PEERS
from goose_strategy.mesh.lane import LANES, CudaLane, PinnedPool, backend_of, lane_for
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from tests.harness.streams import FakeLane, staged
from tests.harness.world import run_ranks

CPU = torch.device("cpu")


class _Event:
    def __init__(self, over=False):
        self.over = over

    def query(self):
        return self.over

    def synchronize(self):
        self.over = True


def _pool():
    made = []

    def allocate(nbytes):
        made.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)

    return PinnedPool(allocate), made


def test_memory_is_used_again_when_its_copies_are_over():
    pool, made = _pool()
    event = _Event()
    first = pool.take(5000)
    pool.give(first, event)
    second = pool.take(6000)
    assert second is not first
    assert made == [8192, 8192]
    event.over = True
    assert pool.take(8192) is first
    pool.give(second, None)
    assert pool.take(4097) is second
    assert made == [8192, 8192]


def test_sizes_are_powers_of_two():
    pool, made = _pool()
    for nbytes in (0, 1, 4096, 4097, 1 << 20, (1 << 20) + 1):
        assert pool.take(nbytes).numel() >= nbytes
    assert made == [4096, 4096, 4096, 8192, 1 << 20, 1 << 21]


def test_at_most_four_of_a_size_wait_for_their_copies():
    pool, made = _pool()
    events = [_Event() for _ in range(4)]
    buffers = [pool.take(1) for _ in events]
    for buffer, event in zip(buffers, events, strict=True):
        pool.give(buffer, event)
    assert pool.take(1) is buffers[0]
    assert [event.over for event in events] == [True, False, False, False]
    assert len(made) == 4


def _groups(ctx, shared_memory):
    lane = FakeLane()
    with staged(lane):
        mesh = ParallelMesh.create(
            MeshLayout.from_world(4, tp=2, pp=2),
            device=CPU,
            timeout=timedelta(seconds=30),
            shared_memory=shared_memory,
            norms=True,
        )
    named = {
        name: getattr(mesh, name)
        for name in ("tp", "pp_forward", "pp_backward", "tie", "model", "norms", "world")
    }
    assert {name for name, group in named.items() if LANES.get(group) is lane} == set(named)
    assert mesh.control not in LANES and mesh.model_control not in LANES
    assert backend_of(mesh.tp, CPU) == "gloo"
    assert backend_of(mesh.tp, torch.device("cuda", 0)) == "gloo"
    assert backend_of(mesh.tp, torch.device("meta")) == ""
    connected = {name for name, group in named.items() if group in PEERS}
    mesh.close()
    assert not LANES
    return connected


@pytest.mark.parametrize("shared_memory", [True, False])
def test_all_groups_of_the_device_have_the_lane(shared_memory):
    expected = {"tp", "pp_forward", "pp_backward", "tie", "model", "world"}
    found = run_ranks(_groups, 4, shared_memory)
    assert found == [expected if shared_memory else set()] * 4


def _alone(ctx):
    with staged(FakeLane()):
        mesh = ParallelMesh.create(
            MeshLayout.from_world(1, tp=1, pp=1), device=CPU, timeout=timedelta(seconds=30)
        )
    assert set(LANES) == {dist.group.WORLD}
    mesh.close()
    assert not LANES


def test_one_rank_on_a_card_has_the_lane_for_the_world():
    run_ranks(_alone, 1)


def test_a_cpu_needs_no_lane():
    assert lane_for(CPU) is None


class _Cuda:
    """What `CudaLane` calls of ``torch.cuda``, in the order of the calls."""

    def __init__(self):
        self.calls = []
        self.at = "current"

    def Stream(self, device):  # noqa: N802  torch's name
        self.calls.append(("Stream", device))
        return f"side{len(self.calls)}"

    def current_stream(self, device):
        return f"current of {device}"

    def Event(self, *, blocking):  # noqa: N802  torch's name
        assert blocking
        cuda = self

        class Event:
            def record(self, stream):
                cuda.calls.append(("record", stream))

        return Event()

    @contextmanager
    def stream(self, stream):
        self.at, before = stream, self.at
        yield
        self.at = before


def test_the_lane_of_a_card_calls_torch():
    cuda, device = _Cuda(), torch.device("cuda", 1)
    with patch.object(torch, "cuda", cuda):
        lane = lane_for(device)
        assert isinstance(lane, CudaLane)
        assert (lane.down, lane.up) == ("side1", "side2")
        assert lane.current() == "current of cuda:1"
        lane.record(lane.down)
    assert cuda.calls == [("Stream", device), ("Stream", device), ("record", "side1")]

    class Target:
        def copy_(self, source, non_blocking):
            self.seen = source, non_blocking, cuda.at

    target = Target()
    with patch.object(torch, "cuda", cuda):
        lane.copy(target, "source", "up")
    assert target.seen == ("source", True, "up")
    assert not lane.takes(torch.zeros(1))


@pytest.mark.gpu
def test_copies_on_a_card():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    lane = lane_for(torch.device("cuda", 0))
    assert lane is not None
    source = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    memory = lane.pool.take(4 << 20).view(torch.float32)
    assert memory.is_pinned()
    lane.down.wait_event(lane.record(lane.current()))
    lane.copy(memory, source, lane.down)
    lane.record(lane.down).synchronize()
    memory.add_(1)
    target = torch.empty_like(source)
    lane.up.wait_event(lane.record(lane.current()))
    lane.copy(target, memory, lane.up)
    up = lane.record(lane.up)
    lane.current().wait_event(up)
    assert torch.equal(target, source + 1)
    assert up.query()
