"""Generators as one thing that is put aside, seeded and taken up again."""

from __future__ import annotations

import io

import pytest
import torch

from goose_strategy.mesh.generators import Generators, changed, fingerprint

CPU = torch.device("cpu")


def test_a_captured_state_draws_the_same_again() -> None:
    generators = Generators(CPU)
    state = generators.capture()
    first = torch.rand(3)
    generators.seed(5)
    assert not torch.equal(torch.rand(3), first)
    generators.restore(state)
    assert torch.equal(torch.rand(3), first)


def test_a_state_is_saved_as_plain_types() -> None:
    generators, stream = Generators(CPU), io.BytesIO()
    torch.save(generators.capture(), stream)
    first = torch.rand(3)
    stream.seek(0)
    generators.restore(torch.load(stream, weights_only=True))
    assert torch.equal(torch.rand(3), first)


def test_a_seed_gives_the_numbers_of_torchs_own_seed() -> None:
    generators = Generators(CPU)
    state = generators.seed(11)
    assert changed(state, generators.capture()) == set()
    mine = torch.rand(3)
    torch.manual_seed(11)
    assert torch.equal(torch.rand(3), mine)


def test_drawing_is_seen_and_advancing_draws_one() -> None:
    generators = Generators(CPU)
    start = generators.seed(11)
    torch.dropout(torch.ones(4), 0.5, train=True)
    assert changed(start, generators.capture()) == {"cpu"}
    generators.restore(start)
    generators.advance(set())
    assert changed(start, generators.capture()) == set()
    generators.advance({"cpu"})
    mine = torch.rand(2)
    generators.restore(start)
    assert torch.equal(torch.rand(3)[1:], mine)


def test_a_fingerprint_depends_on_every_draw_and_part() -> None:
    generators = Generators(CPU)
    state = generators.seed(11)
    seen = {fingerprint(state), fingerprint(state, 0), fingerprint(state, 1)}
    for _ in range(700):  # past the point where the generator makes new words
        generators.advance({"cpu"})
        seen.add(fingerprint(generators.capture()))
    assert len(seen) == 703
    assert all(0 <= value < 2**62 for value in seen)
    assert fingerprint(generators.seed(11)) == fingerprint(state)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_devices_generator_moves_along() -> None:
    device = torch.device("cuda", 0)
    generators = Generators(device)
    start = generators.seed(11)
    assert set(start) == {"cpu", "cuda"}
    first = torch.rand(3, device=device)
    assert changed(start, generators.capture()) == {"cuda"}
    generators.restore(start)
    generators.advance({"cuda"})
    assert changed(start, generators.capture()) == {"cuda"}
    generators.restore(start)
    assert torch.equal(torch.rand(3, device=device), first)
