"""A forward that runs a second time finds what the first one found, and changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import ScheduleError
from goose_strategy.pipeline_parallel.replay import Buffers, Replay


class Stateful(nn.Module):
    """Multiplies by a buffer that it doubles, adds one that it replaces, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("offset", torch.tensor(0.0))
        self.register_buffer("still", torch.full((3,), float("nan")))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = x * self.scale + self.offset + self.calls
        self.scale.mul_(2)
        self.register_buffer("offset", self.offset + 1)
        self.calls += 1
        self.longest = max(getattr(self, "longest", 0), int(x.max()))
        return out + self.longest


def state_of(module: Any) -> tuple[Any, ...]:
    return module.scale.item(), module.offset.item(), module.calls, getattr(module, "longest", None)


def test_every_run_is_repeated_in_any_order() -> None:
    module = Stateful()
    buffers = Buffers(module)
    values = [torch.tensor([float(n)]) for n in (3, 7, 5)]
    outputs, changes = [], []
    for x in values:
        with buffers.first() as seen:
            outputs.append(module(x))
        changes.append(seen)
    after = state_of(module)
    for index in (1, 0, 2, 1):
        with buffers.again(changes[index]):
            assert torch.equal(module(values[index]), outputs[index])
        assert state_of(module) == after
    alone = Stateful()
    assert [alone(x) for x in values] == outputs


def test_what_is_not_there_before_is_not_there_the_second_time() -> None:
    module = Stateful()
    buffers = Buffers(module)
    with buffers.first() as seen:
        module(torch.zeros(1))
    with buffers.again(seen):
        assert not hasattr(module, "longest")
    assert module.longest == 0


def test_an_error_leaves_everything_as_it_was() -> None:
    module = Stateful()
    buffers = Buffers(module)
    with buffers.first() as seen:
        module(torch.zeros(1))
    after = state_of(module)
    broken = torch.zeros(2, 2).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"), buffers.again(seen):
        broken.mul_(module(torch.zeros(1)))
    assert state_of(module) == after


def test_batch_norm_counts_once_though_it_leaves_no_trace_in_versions() -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4)
    alone = copy.deepcopy(norm)
    buffers = Buffers(norm)
    x = torch.randn(8, 4)
    for mode in (True, False, True):
        norm.train(mode)
        alone.train(mode)
        with buffers.first() as seen:
            norm(x)
        alone(x)
        with buffers.again(seen):
            norm(x)
        for mine, theirs in zip(norm.buffers(), alone.buffers(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_shared_buffer_stays_shared() -> None:
    first, second = Stateful(), Stateful()
    second.scale = first.scale
    both = nn.ModuleList([first, second])
    buffers = Buffers(both)
    with buffers.first() as seen:
        outputs = [one(torch.ones(1)) for one in (first, second)]
    with buffers.again(seen):
        assert first.scale is second.scale
        assert [one(torch.ones(1)) for one in (first, second)] == outputs
    assert first.scale is second.scale
    assert first.scale.item() == 4


def test_a_write_that_comes_later_is_refused() -> None:
    module = nn.Module()
    module.register_buffer("total", torch.zeros(1))
    total: Tensor = module.get_buffer("total")
    buffers = Buffers(module)
    with buffers.first():
        pass
    with (
        pytest.raises(ScheduleError, match="buffer total of a Module was written to by this"),
        buffers.first(),
    ):
        total += 1


def test_random_numbers_are_those_of_the_first_run() -> None:
    replay = Replay(nn.Linear(1, 1))
    with replay.first([]) as seen:
        first = torch.rand(3)
    between = torch.rand(3)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with replay.again(seen):
        assert torch.equal(torch.rand(3), first)
    # The caller's own numbers go on as if nothing had happened.
    assert torch.equal(torch.rand(3), expected)
    assert not torch.equal(between, first)


def test_inputs_that_were_written_to_are_refused() -> None:
    replay = Replay(nn.Linear(1, 1))
    mask = torch.ones(2)
    with replay.first([mask, None, 3]) as seen:
        pass
    with replay.again(seen):
        pass
    mask[0] = 0
    with pytest.raises(ScheduleError, match="written to in place"), replay.again(seen):
        pass
