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


def test_each_rank_continues_its_own_numbers_in_the_same_layout_only() -> None:
    assert run_ranks(resume, 2) == [[True] * 4] * 2
