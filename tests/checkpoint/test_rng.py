from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import torch

from goose_strategy.checkpoint.rng import (
    capture_rng_state,
    gather_rng_states,
    restore_rng_state,
    scatter_rng_states,
)
from tests.checkpoint.toy import CPU, make_mesh
from tests.harness.world import run_ranks


def draw() -> tuple[float, ...]:
    return (random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(),
            torch.rand(()).item())  # fmt: skip


def test_a_restored_state_draws_the_same_numbers() -> None:
    draw()
    stream = io.BytesIO()
    torch.save(capture_rng_state(CPU), stream)
    expected = [draw() for _ in range(3)]
    stream.seek(0)
    restore_rng_state(torch.load(stream, weights_only=True), CPU)
    assert [draw() for _ in range(3)] == expected


def resume(context: Any) -> list[bool]:
    mesh = make_mesh(2, 1, 1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(mesh.rank)
    states = gather_rng_states(mesh)
    expected = draw()
    restored = scatter_rng_states(states, mesh)
    verdicts = [restored, draw() == expected]
    mesh.close()
    other = make_mesh(1, 1, 2)
    expected = draw()
    scatter_rng_states(gather_rng_states(other), other)
    untouched = torch.get_rng_state()
    verdicts += [not scatter_rng_states(states, other)]
    verdicts += [torch.equal(torch.get_rng_state(), untouched)]
    other.close()
    return verdicts


class Counter:
    """A stream that counts."""

    def __init__(self, start: int) -> None:
        self.at = torch.tensor(start)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def resume_streams(context: Any) -> list[int]:
    mesh = make_mesh(2, 1, 1)
    stream = io.BytesIO()
    own = [Counter(10 + mesh.rank), Counter(20 + mesh.rank)]
    torch.save(gather_rng_states(mesh, own), stream)
    stream.seek(0)
    states = torch.load(stream, weights_only=True)
    more = [Counter(0), Counter(0), Counter(3)]
    scatter_rng_states(states, mesh, more)
    scatter_rng_states(states, mesh)
    mesh.close()
    return [int(counter.at) for counter in more]


def test_streams_beside_the_generators_are_saved_with_them() -> None:
    assert run_ranks(resume_streams, 2) == [[10, 20, 3], [11, 21, 3]]


def test_each_rank_continues_its_own_numbers_in_the_same_layout_only() -> None:
    assert run_ranks(resume, 2) == [[True] * 4] * 2
