"""Neighbours on one machine: connected where they can be, agreed where they cannot."""

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from goose_strategy.mesh import host
from goose_strategy.mesh.host import PEERS, connect_host, disconnect_host, map_memory
from tests.harness.world import run_ranks

MINUTE = timedelta(seconds=60)


def _connect(ctx):
    group = dist.group.WORLD
    connected = connect_host(
        {"tp": group, "pp_forward": None}, control=group, timeout=timedelta(seconds=1.5)
    )
    peers = PEERS[group]
    try:
        mine = peers.boxes(torch.int64)
        mine[ctx.rank][:3] = ctx.rank + 1
        dist.barrier()
        seen = [int(box[2]) for box in mine]
        other = peers.boxes(torch.int64)
        apart = other[0].data_ptr() != mine[0].data_ptr()
        again = peers.boxes(torch.int64)[0].data_ptr() == mine[0].data_ptr()
        limit = peers.sockets[0][1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
        order = [at for at, _ in peers.sockets]
    finally:
        disconnect_host(connected)
    return seen, apart, again, limit, order, group in PEERS


def test_outboxes_are_shared_and_take_turns():
    for rank, got in enumerate(run_ranks(_connect, 4)):
        seen, apart, again, limit, order, left = got
        assert seen == [1, 2, 3, 4]
        assert apart
        assert again
        assert limit == (1).to_bytes(8, "little") + (500000).to_bytes(8, "little")
        assert order == [other for other in range(4) if other != rank]
        assert not left


def _apart(ctx, reason, monkeypatch):
    group = dist.group.WORLD
    if reason == "other machine":
        monkeypatch.setattr(host, "_machine", lambda: (f"machine {ctx.rank}", "", ""))
    elif reason == "unknown machine":
        monkeypatch.setattr(host, "_machine", lambda: ("", "", ""))
    elif ctx.rank == 1 and reason == "no memory":

        def fail(_peers):
            raise OSError("no memory")

        monkeypatch.setattr(host, "_swap_boxes", fail)
    return len(connect_host({"tp": group}, control=group, timeout=MINUTE)), len(PEERS)


def _with_patch(ctx, reason):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _apart(ctx, reason, monkeypatch)


@pytest.mark.parametrize("reason", ["other machine", "unknown machine", "no memory"])
def test_all_ranks_agree_to_stay_with_the_backend(reason):
    assert run_ranks(_with_patch, 2, reason) == [(0, 0), (0, 0)]


def test_machines_differ_by_boot_network_and_user():
    boot, network, user = host._machine()
    assert boot
    assert network
    assert user == str(os.getuid())


def test_memory_is_shared_between_maps():
    descriptor = os.memfd_create("test")
    try:
        os.ftruncate(descriptor, 64)
        one, two = map_memory(descriptor, 64), map_memory(descriptor, 64)
    finally:
        os.close(descriptor)
    one[3] = 7
    assert two.tolist() == [0, 0, 0, 7] + [0] * 60
