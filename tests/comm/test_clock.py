"""Clocks of ranks of one machine are one clock; those of others are compared by messages."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from goose_strategy.comm import clock
from goose_strategy.comm.clock import ClockOffset, clock_offset
from tests.harness.worker import Context
from tests.harness.world import run_ranks

SECOND = 10**9


def on_one_machine(ctx: Context) -> ClockOffset:
    assert dist.group.WORLD is not None
    return clock_offset(dist.group.WORLD)


def on_machines_of_their_own(ctx: Context) -> tuple[ClockOffset, int]:
    """Shift every rank's clock; what is found must undo the shift."""
    assert dist.group.WORLD is not None
    shift = 7 * ctx.rank * SECOND
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "clock_name", lambda: f"machine {ctx.rank // 2}")
        patch.setattr(clock, "read_clock", lambda: time.perf_counter_ns() + shift)
        return clock_offset(dist.group.WORLD, rounds=10), shift


def test_ranks_of_one_machine_read_one_counter() -> None:
    assert run_ranks(on_one_machine, 4) == [ClockOffset(0, 0)] * 4


def test_other_machines_are_found_within_the_error_that_is_told() -> None:
    results = run_ranks(on_machines_of_their_own, 4)
    # Ranks 0 and 1 share a machine: nothing is measured between them.
    assert [offset for offset, _ in results[:2]] == [ClockOffset(0, 0)] * 2
    for offset, shift in results[2:]:
        assert abs(offset.offset_ns + shift) <= offset.error_ns
        assert 0 < offset.error_ns < SECOND // 2


def test_a_counter_is_named_by_boot_and_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clock.clock_name() == clock.clock_name()
    monkeypatch.setattr(clock, "_BOOT", clock._BOOT / "missing")
    assert str(os.getpid()) in clock.clock_name()
