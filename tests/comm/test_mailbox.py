"""The shared-memory mailbox: memory grows to what is under way and is used again."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from goose_strategy.comm.mailbox import Mailbox, mailbox_of
from goose_strategy.errors import PeerError
from goose_strategy.mesh.host import PEERS, connect_host, disconnect_host
from tests.harness.world import run_ranks

MIB = 1 << 18  # elements of fp32


def _ignore(_op, _tensor):
    pass


def _with_box(ctx, body, timeout_s=20.0):
    group = dist.group.WORLD
    connected = connect_host(
        {"pp_forward": group}, control=group, timeout=timedelta(seconds=timeout_s)
    )
    try:
        box = mailbox_of(1 - ctx.rank, PEERS[group])
        assert mailbox_of(1 - ctx.rank, PEERS[group]) is box
        assert isinstance(box, Mailbox)
        return body(ctx, box)
    finally:
        disconnect_host(connected)


def _sizes(box):
    return [area.memory.numel() >> 20 for area in box._areas]


def _memory(ctx, box):
    sizes = []
    for burst in (1, 1, 1, 6, 6, 1):
        if ctx.rank == 0:
            for index in range(burst):
                box.send([torch.full((MIB // 2,), float(index))], "half", _ignore)
        else:
            for index in range(burst):
                (got,) = box.receive("half", None, _ignore).wait()
                assert got.tolist() == [float(index)] * (MIB // 2)
        dist.barrier()
        sizes.append(_sizes(box))
    if ctx.rank == 0:
        box.send([torch.zeros(20 * MIB)], "large", _ignore)
        sizes.append(_sizes(box))
    else:
        assert box.receive("large", None, _ignore).wait()[0].numel() == 20 * MIB
    return sizes


def _memory_run(ctx):
    return _with_box(ctx, _memory)


def test_memory_is_used_again():
    sender, receiver = run_ranks(_memory_run, 2)
    assert sender == [[1], [1], [1], [1, 2], [1, 2], [1, 2], [1, 2, 20]]
    assert receiver == [[]] * 6


def _thanks(ctx, box):
    """A sender that never looks at the thanks of thousands of messages does not block anybody."""
    for index in range(1500):
        if ctx.rank == 0:
            box.send([torch.tensor([float(index)])], "k", _ignore)
        else:
            (got,) = box.receive("k", None, _ignore).wait()
            assert got.item() == index
    return _sizes(box)


def _thanks_run(ctx):
    return _with_box(ctx, _thanks)


def test_thousands_of_small_messages():
    assert run_ranks(_thanks_run, 2)[0] == [1]


def _last_words(ctx, box):
    """What was sent before the sender left can still be read; after that it is gone."""
    if ctx.rank == 0:
        box.send([torch.ones(1)], "k", _ignore)
        box.send([torch.full((1,), 5.0)], "k", _ignore)
        dist.barrier()
        return None  # leaves with the thanks for its first message unread
    first = box.receive("k", None, _ignore).wait()[0].item()
    dist.barrier()
    time.sleep(0.3)
    second = box.receive("k", None, _ignore).wait()[0].item()
    try:
        box.receive("k", None, _ignore).wait()
    except PeerError as err:
        return first, second, str(err)
    return None


def _last_words_run(ctx):
    return _with_box(ctx, _last_words)


def test_messages_survive_their_sender():
    _, (first, second, text) = run_ranks(_last_words_run, 2)
    assert (first, second) == (1.0, 5.0)
    assert text.startswith("rank 1 waited for rank 0 for 'k' on pp_forward, which is gone")
