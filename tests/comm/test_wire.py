"""The process-group wire: the header travels once per key."""

import gc

import torch
import torch.distributed as dist

from goose_strategy.comm.message import HEADER_NUMEL
from goose_strategy.comm.wire import Wire
from tests.harness.world import run_ranks


class _Counting:
    """A group that counts what is launched through it."""

    def __init__(self, group):
        self._group = group
        self.numels = []

    def send(self, tensors, peer, tag):
        self.numels.append(tensors[0].numel())
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        self.numels.append(tensors[0].numel())
        return self._group.recv(tensors, peer, tag)


def _wire(ctx):
    wire = Wire(1 - ctx.rank, dist.group.WORLD, deadline=None, device=torch.device("cpu"))
    wire._group = _Counting(dist.group.WORLD)
    return wire


def _ignore(_op, _tensor):
    pass


def _headers(ctx):
    wire = _wire(ctx)
    for key, numel in (("a", 3), ("a", 3), ("b", 5), ("a", 3)):
        if ctx.rank == 0:
            wire.send([torch.ones(numel)], key, _ignore)
        else:
            wire.receive(key, None, _ignore).wait()
    left = len(wire.in_flight)
    wire.flush()
    dist.barrier()
    return wire._group.numels, left, len(wire.in_flight)


def test_a_header_travels_once_per_key():
    sender, receiver = run_ranks(_headers, 2)
    launched = [HEADER_NUMEL, 3, 3, HEADER_NUMEL, 5, 3]
    assert sender == (launched, 4, 0)
    assert receiver == (launched, 0, 0)


def _dropped(ctx):
    """gloo forgets a message whose work is freed; the wire keeps it."""
    wire = _wire(ctx)
    if ctx.rank == 0:
        wire.send([torch.ones(2)], "k", _ignore)
        gc.collect()
        dist.barrier()
        wire.flush()
        return None
    dist.barrier()
    return wire.receive("k", None, _ignore).wait()[0].tolist()


def test_a_dropped_send_still_arrives():
    assert run_ranks(_dropped, 2)[1] == [1.0, 1.0]
