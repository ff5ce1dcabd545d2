"""What breaks when torch moves its private APIs: each test names the user of one."""

import pytest
import torch.distributed as dist

from goose_strategy.compat.torch import clone_store, default_store
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
