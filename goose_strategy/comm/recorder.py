"""A record of what was launched, to compare the ranks of a group.

A collective that one rank launches and another does not, or launches in another order, hangs or
mixes up data; which of the two depends on the backend's buffering. Parity tests record every
launch and compare, so that an order that gloo forgives and NCCL does not is seen on gloo.
``TORCH_DISTRIBUTED_DEBUG=DETAIL`` checks shapes too, but at the price of one more collective for
each, and it knows neither stages nor messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


class Launch(NamedTuple):
    """One launch: on which communicator, what, towards whom, of which shape and type."""

    group: str
    op: str
    peer: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


class Recorder:
    """The launches of one rank, in order. Install it with `recording`.

    Attributes:
        launches: What was launched while this recorder was installed.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def note(self, group: ProcessGroup, op: str, tensor: Tensor, peer: int | None = None) -> None:
        """Record one launch.

        Args:
            group: Communicator.
            op: Name of the operation with what else must agree, e.g. ``"all_reduce sum"``.
            tensor: What travels.
            peer: Global rank of the other end of a message, or the source of a broadcast.
        """
        self.launches.append(
            Launch(group_label(group), op, peer, tuple(tensor.shape), tensor.dtype)
        )

    def by_group(self) -> dict[str, list[Launch]]:
        """Return the launches of each communicator, in order."""
        groups: dict[str, list[Launch]] = {}
        for launch in self.launches:
            groups.setdefault(launch.group, []).append(launch)
        return groups

    def hash(self, group: str | None = None) -> str:
        """Return a digest of the launches, equal on ranks that launched the same.

        Args:
            group: Label of one communicator; all of them if ``None``.
        """
        chosen = [launch for launch in self.launches if group in (None, launch.group)]
        return hashlib.sha256(repr(chosen).encode()).hexdigest()


def group_label(group: ProcessGroup) -> str:
    """Name a communicator the same way on all its members, e.g. ``"goose_tp[0, 1]"``."""
    return f"{group.group_desc}{dist.get_process_group_ranks(group)}"


ACTIVE: list[Recorder] = []
"""Installed recorders. Empty outside of tests, so that a launch pays one truth test."""


@contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Record every launch of this process into ``recorder`` while the context is open."""
    ACTIVE.append(recorder)
    try:
        yield recorder
    finally:
        ACTIVE.remove(recorder)


def mismatches(launches: Mapping[int, Recorder]) -> list[str]:
    """Compare the records of all ranks.

    Collectives must be the same on all members of a communicator, and the messages of each
    direction of each pair must be received as they were sent.

    Args:
        launches: The recorder of each global rank.

    Returns:
        One sentence per communicator or pair that differs; empty if all agree.
    """
    collectives: dict[str, dict[int, list[Launch]]] = {}
    sent: dict[tuple[str, int, int], list[Launch]] = {}
    received: dict[tuple[str, int, int], list[Launch]] = {}
    for rank, recorder in launches.items():
        for launch in recorder.launches:
            if launch.op == "send" and launch.peer is not None:
                sent.setdefault((launch.group, rank, launch.peer), []).append(launch)
            elif launch.op == "receive" and launch.peer is not None:
                received.setdefault((launch.group, launch.peer, rank), []).append(launch)
            else:
                collectives.setdefault(launch.group, {}).setdefault(rank, []).append(launch)
    found = [text for group, by_rank in collectives.items() for text in _differing(group, by_rank)]
    for pair in sorted(sent.keys() | received.keys()):
        group, source, target = pair
        there = [launch[3:] for launch in sent.get(pair, [])]
        here = [launch[3:] for launch in received.get(pair, [])]
        if there != here:
            found.append(
                f"{group}: rank {source} sent {there} to rank {target}, which received {here}."
            )
    return found


def _differing(group: str, by_rank: Mapping[int, list[Launch]]) -> list[str]:
    """Describe where the collectives of one communicator first differ between two ranks."""
    members = [int(rank) for rank in group[group.index("[") + 1 : -1].split(",")]
    reference, *others = members
    expected = by_rank.get(reference, [])
    found = []
    for rank in others:
        actual = by_rank.get(rank, [])
        if actual == expected:
            continue
        at = next(
            (i for i, pair in enumerate(zip(expected, actual, strict=False)) if pair[0] != pair[1]),
            min(len(expected), len(actual)),
        )
        found.append(
            f"{group}: launch {at} is {expected[at : at + 1]} on rank {reference} "
            f"but {actual[at : at + 1]} on rank {rank}."
        )
    return found
