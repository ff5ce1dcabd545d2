"""Flat collectives by gloo's messages; their sums are in ``test_collectives`` and ``test_host``."""

import gc

import torch
import torch.distributed as dist

from goose_strategy.comm.exchange import _IN_FLIGHT, GatherByMessages, ScatterByExchange
from tests.harness.world import run_ranks


def _dropped(ctx):
    """Only one rank waits; the other drops its handle, and still its shard arrives."""
    group = dist.group.WORLD
    output = torch.zeros(4)
    pending = GatherByMessages(output, torch.full((2,), float(ctx.rank + 1)), group)
    if ctx.rank == 0:
        pending.wait()
        pending.wait()
    else:
        del pending
        gc.collect()
    dist.barrier()
    for left in list(_IN_FLIGHT):
        left.wait()
    return output.tolist(), len(_IN_FLIGHT)


def test_a_dropped_gather_still_reaches_the_others():
    assert run_ranks(_dropped, 2) == [([1.0, 1.0, 2.0, 2.0], 0)] * 2


def _scatter(ctx):
    flat = torch.arange(6, dtype=torch.int32) * (ctx.rank + 1)
    pending = ScatterByExchange(flat, dist.group.WORLD)
    pending.wait()
    pending.wait()
    return flat[2 * ctx.rank : 2 * ctx.rank + 2].tolist()


def test_whole_numbers_are_summed():
    assert run_ranks(_scatter, 3) == [[0, 6], [12, 18], [24, 30]]
