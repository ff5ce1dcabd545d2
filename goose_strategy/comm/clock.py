"""By how much the ranks' clocks differ.

``time.perf_counter_ns`` has another zero on every machine, so times of several ranks cannot be laid
side by side. torch's profiler takes the wall clock, which NTP keeps within milliseconds: longer
than many a message. Ranks of one machine share the counter, and are found by its boot; with ranks
on other machines a few messages to and fro bound the difference from both sides.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from goose_strategy.comm.collectives import all_gather_objects

ROUNDS = 20
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/time")


class ClockOffset(NamedTuple):
    """What to add to this rank's ``time.perf_counter_ns()`` to get that of the first rank.

    Attributes:
        offset_ns: Nanoseconds to add.
        error_ns: By how much the sum may be off, at most; 0 where both ranks read one counter.
    """

    offset_ns: int
    error_ns: int


def clock_offset(group: ProcessGroup, *, rounds: int = ROUNDS) -> ClockOffset:
    """Compare this rank's clock with that of the group's first rank. Collective.

    Args:
        group: A gloo group.
        rounds: Messages to and fro per rank; the fastest counts.

    Returns:
        The offset. Off by at most half of that fastest round.
    """
    clocks = all_gather_objects(clock_name(), group)
    ranks = dist.get_process_group_ranks(group)
    offset = ClockOffset(0, 0)
    for index, clock in enumerate(clocks):
        if clock == clocks[0]:
            continue
        if dist.get_rank() == ranks[0]:
            _answer(ranks[index], group, rounds)
        elif dist.get_rank() == ranks[index]:
            offset = _ask(ranks[0], group, rounds)
    return offset


def clock_name() -> str:
    """Name the counter that ``time.perf_counter_ns`` reads, alike for all who read the same one."""
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(_NAMESPACE)}"
    except OSError:  # not Linux: taken for a machine of its own, which costs a few messages
        return f"{socket.gethostname()} {os.getpid()}"


def read_clock() -> int:
    """Return this rank's clock in nanoseconds."""
    return time.perf_counter_ns()


def _answer(peer: int, group: ProcessGroup, rounds: int) -> None:
    """Send the time at every question."""
    message = torch.zeros(1, dtype=torch.int64)
    for _ in range(rounds):
        dist.recv(message, src=peer, group=group)
        message.fill_(read_clock())
        dist.send(message, dst=peer, group=group)


def _ask(peer: int, group: ProcessGroup, rounds: int) -> ClockOffset:
    """Ask for the time; it was read between the question and its answer."""
    message = torch.zeros(1, dtype=torch.int64)
    best: ClockOffset | None = None
    for _ in range(rounds):
        asked = read_clock()
        dist.send(message, dst=peer, group=group)
        dist.recv(message, src=peer, group=group)
        answered = read_clock()
        half = (answered - asked + 1) // 2
        if best is None or half < best.error_ns:
            best = ClockOffset(int(message.item()) - (asked + answered) // 2, half)
    if best is None:
        raise ValueError(f"rounds={rounds} must be at least 1.")
    return best
