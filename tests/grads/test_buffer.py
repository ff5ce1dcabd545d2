"""States of a bucket's gradients, against a plain account of who contributed what.

The ranks are buffers in one process; the sum over dp is done by hand, and scrambles what it leaves
stale. All numbers are small powers of two times integers, so that everything is exact.
"""

from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.comm.collectives import DONE
from goose_strategy.grads.buffer import GradBuffer, GradSlot, GradState, Stash

SIZES = (3, 8, 1, 5, 2)
STARTS = (0, 4, 12, 16, 24)
TOTAL = 32


class World:
    """The buffers of all ranks, and the account: global sums and local contributions."""

    def __init__(self, ranks: int, *, average: bool = False, primary: bool = True) -> None:
        self.ranks = ranks
        self.replicas = ranks if average else 1
        self.buffers = []
        share = TOTAL // ranks
        for rank in range(ranks):
            flat = torch.zeros(TOTAL, dtype=torch.float64)
            slots = [
                GradSlot(str(i), nn.Parameter(torch.zeros(n, dtype=flat.dtype)), flat=flat, start=s)
                for i, (n, s) in enumerate(zip(SIZES, STARTS, strict=True))
            ]
            self.buffers.append(
                GradBuffer(
                    flat,
                    slots,
                    start=rank * share,
                    stop=(rank + 1) * share,
                    replicas=self.replicas,
                    primary=primary,
                )
            )
        self.reduced: list[Tensor | None] = [None] * len(SIZES)
        self.local: list[dict[int, Tensor]] = [{} for _ in SIZES]

    def contribute(self, rank: int, index: int, value: Tensor) -> None:
        """What autograd and the hooks do."""
        buffer = self.buffers[rank]
        slot = buffer.slots[index]
        if buffer.closed:
            buffer.open()
        if slot.param.grad is None:
            slot.param.grad = value.clone()
            buffer.adopt(slot)
        else:
            slot.param.grad.add_(value)
        account = self.local[index]
        account[rank] = account.get(rank, torch.zeros_like(value)) + value

    def reduce(self) -> None:
        for buffer in self.buffers:
            buffer.prepare()
        total = torch.stack([buffer.flat for buffer in self.buffers]).sum(0)
        for buffer in self.buffers:
            for slot in buffer.slots:
                slot.view.fill_(float("nan"))
            buffer.own.copy_(total[buffer.start : buffer.stop])
            buffer.start_reduce(DONE)
        for index in range(len(SIZES)):
            slots = [buffer.slots[index] for buffer in self.buffers]
            if any(slot.param.grad is not None for slot in slots):
                for slot in slots:
                    slot.param.grad = slot.view
            if self.local[index]:
                mean = torch.stack(list(self.local[index].values())).sum(0) / self.replicas
                before = self.reduced[index]
                self.reduced[index] = mean if before is None else before + mean
                self.local[index] = {}

    def clear(self, index: int) -> None:
        for buffer in self.buffers:
            buffer.slots[index].param.grad = None
        self.reduced[index] = None
        self.local[index] = {}

    def zero(self, index: int) -> None:
        for rank, buffer in enumerate(self.buffers):
            buffer.settle()
            grad = buffer.slots[index].param.grad
            if grad is not None:
                grad.zero_()
                if rank in self.local[index]:
                    self.local[index][rank] = torch.zeros_like(grad)
        if self.reduced[index] is not None:
            self.reduced[index] = torch.zeros_like(self.reduced[index])

    def check(self) -> None:
        """Reduce, and compare the slices of all ranks with the account."""
        self.reduce()
        for buffer in self.buffers:
            buffer.settle()
        whole = torch.cat([buffer.own for buffer in self.buffers])
        for index, expected in enumerate(self.reduced):
            grads = [buffer.slots[index].param.grad for buffer in self.buffers]
            assert [grad is None for grad in grads] == [expected is None] * self.ranks
            if expected is not None:
                start = STARTS[index]
                assert torch.equal(whole[start : start + SIZES[index]], expected), index
        gaps = [i for i in range(TOTAL) if not any(s <= i < s + n for s, n in _places())]
        assert all(whole[i] == 0 for i in gaps)

    # -- calls ---------------------------------------------------------------------------------

    def park(self) -> tuple[list[Stash | None], list[Tensor | None], list[dict[int, Tensor]]]:
        stashes = [buffer.park() for buffer in self.buffers]
        account = (self.reduced, self.local)
        self.reduced, self.local = [None] * len(SIZES), [{} for _ in SIZES]
        return stashes, *account

    def restore(self, parked: tuple) -> None:
        stashes, self.reduced, self.local = parked
        for buffer, stash in zip(self.buffers, stashes, strict=True):
            if stash is not None:
                buffer.restore(stash)

    def add(self, parked: tuple, factor: float | Tensor) -> None:
        stashes, reduced, local = parked
        for buffer, stash in zip(self.buffers, stashes, strict=True):
            if stash is not None:
                buffer.add(stash, factor)
        for index in range(len(SIZES)):
            if reduced[index] is not None:
                before = self.reduced[index]
                more = reduced[index] * factor
                self.reduced[index] = more if before is None else before + more
            for rank, value in local[index].items():
                before = self.local[index].get(rank, torch.zeros_like(value))
                self.local[index][rank] = before + value * factor


def _places() -> list[tuple[int, int]]:
    return list(zip(STARTS, SIZES, strict=True))


def _value(draw: random.Random, index: int) -> Tensor:
    numbers = [draw.randint(-8, 8) for _ in range(SIZES[index])]
    return torch.tensor(numbers, dtype=torch.float64)


def _contributions(world: World, draw: random.Random) -> None:
    for _ in range(draw.randint(0, 6)):
        index = draw.randrange(len(SIZES))
        world.contribute(draw.randrange(world.ranks), index, _value(draw, index))


def _call(world: World, draw: random.Random) -> tuple:
    held = world.park()
    _contributions(world, draw)
    if draw.random() < 0.6:
        world.reduce()
    call = world.park()
    world.restore(held)
    return call


def _release_or_drop(world: World, draw: random.Random, calls: list[tuple]) -> None:
    call = calls.pop(draw.randrange(len(calls)))
    if draw.random() < 0.2:
        del call  # dropped: its gradients go with it
        gc.collect(0)
    else:
        world.add(call, draw.choice([1.0, 0.5, torch.tensor(2.0)]))


def _clear_all(world: World) -> None:
    for index in range(len(SIZES)):
        world.clear(index)


def _play(seed: int, world: World) -> None:
    """Do sixty random things, and compare with the account now and then."""
    draw = random.Random(1000 * seed + world.ranks)
    calls: list[tuple] = []
    for _ in range(60):
        actions = [
            lambda: _contributions(world, draw),
            lambda: _contributions(world, draw),
            world.reduce,
            lambda: world.clear(draw.randrange(len(SIZES))),
            lambda: world.zero(draw.randrange(len(SIZES))),
            lambda: _clear_all(world),
            lambda: calls.append(_call(world, draw)),
            lambda: _release_or_drop(world, draw, calls) if calls else None,
        ]
        draw.choice(actions)()
        if draw.random() < 0.2:
            world.check()
    world.check()


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_contribution_counts_once(ranks: int, average: bool) -> None:
    for seed in range(40):
        _play(seed, World(ranks, average=average))


def _plays() -> None:
    for seed in range(5):
        _play(seed, World(2))


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradBuffer, "_spread", lambda self, kept: None)
    with pytest.raises(AssertionError):
        _plays()


def test_states_follow_the_picture() -> None:
    world = World(2)
    buffer = world.buffers[0]
    states = [buffer.state]
    world.contribute(0, 0, torch.ones(3, dtype=torch.float64))
    states.append(buffer.state)
    world.reduce()
    states.append(buffer.state)
    buffer.settle()
    states.append(buffer.state)
    world.contribute(0, 0, torch.ones(3, dtype=torch.float64))
    states.append(buffer.state)
    assert states == [
        GradState.EMPTY,
        GradState.LOCAL,
        GradState.REDUCING,
        GradState.REDUCED,
        GradState.LOCAL,
    ]
    world.check()


def test_a_rank_that_is_not_primary_brings_nothing_into_the_second_sum() -> None:
    world = World(1, primary=False)
    world.contribute(0, 0, torch.ones(3, dtype=torch.float64))
    world.reduce()
    world.contribute(0, 0, torch.full((3,), 4.0, dtype=torch.float64))
    world.reduce()
    world.buffers[0].settle()
    assert world.buffers[0].slots[0].param.grad.tolist() == [4.0] * 3


def test_an_unheld_call_copies_nothing() -> None:
    world = World(2)
    world.contribute(0, 1, torch.ones(8, dtype=torch.float64))
    world.reduce()
    stash = world.buffers[0].park()
    assert stash.values is None
    assert world.buffers[0].slots[1].param.grad is None
    world.buffers[0].add(stash, 1.0)
    assert stash.values is None
    assert world.buffers[0].slots[1].param.grad is world.buffers[0].slots[1].view


def test_an_evicted_reduced_stash_is_one_slice() -> None:
    world = World(4)
    world.contribute(1, 1, torch.ones(8, dtype=torch.float64))
    world.reduce()
    stashes = world.park()[0]
    for buffer in world.buffers:
        buffer.open()
    assert [stash.values.numel() for stash in stashes] == [TOTAL // 4] * 4


def test_a_dropped_stash_frees_the_flat() -> None:
    world = World(1)
    world.contribute(0, 0, torch.ones(3, dtype=torch.float64))
    world.park()
    gc.collect()
    world.contribute(0, 0, torch.ones(3, dtype=torch.float64))
    assert world.buffers[0].slots[0].param.grad.tolist() == [1.0] * 3


def test_a_gradient_assigned_by_hand_counts_as_reduced() -> None:
    world = World(2)
    for buffer in world.buffers:
        buffer.slots[0].param.grad = torch.full((3,), 7.0, dtype=torch.float64)
        assert [slot.name for slot in buffer.attached()] == ["0"]
        assert buffer.state is GradState.REDUCED
    world.reduced[0] = torch.full((3,), 7.0, dtype=torch.float64)
    world.check()
