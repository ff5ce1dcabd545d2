"""Calls see a sharded module through a page of names; the module must offer all of them."""

from __future__ import annotations

from torch import nn

from goose_strategy.runtime.handle import Handle
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import started

WORDS = {name for name in vars(Handle) if not name.startswith("_")} | set(Handle.__annotations__)


def _missing(ctx: Context) -> set[str]:
    with started(1, 1) as runtime:
        handle = runtime.shard_module(nn.Linear(2, 1))
        return {name for name in WORDS if not hasattr(handle, name)}


def test_a_sharded_module_offers_everything_on_the_page() -> None:
    assert {"mesh", "watch", "counting", "run_pipeline", "surgery"} <= WORDS
    assert run_ranks(_missing, 1) == [set()]
