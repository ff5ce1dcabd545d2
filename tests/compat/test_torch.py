"""What breaks when torch moves its private APIs: each test names the user of one."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from goose_strategy.compat.torch import clone_store, default_store, inside_backward
from tests.harness.world import run_ranks


def _stores(ctx):
    store = default_store()
    clone = clone_store(store)
    if ctx.rank == 0:
        clone.set("goose/test", "here")
    dist.barrier()
    return store is clone, store.get("goose/test"), clone.check(["goose/absent"])


def test_the_watchdog_finds_the_ranks_store_and_opens_a_second_connection():
    assert run_ranks(_stores, 2) == [(False, b"here", False)] * 2


def test_without_a_world_there_is_no_store():
    with pytest.raises(RuntimeError, match="there is no default process group"):
        default_store()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_dropout_stream_knows_a_call_that_computes_again(reentrant):
    seen = []

    def compute(x):
        seen.append(inside_backward())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    checkpoint(compute, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True]
    assert not inside_backward()
