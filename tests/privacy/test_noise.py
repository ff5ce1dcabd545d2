"""Noise is normal, keyed by name, step and element, and nobody's seed changes it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from goose_strategy.privacy.noise import BLOCK, Noise, fresh_root, root_from


def field(
    noise: Noise, size: int, *, name: str = "w", step: int = 1, start: int = 0
) -> torch.Tensor:
    target = torch.zeros(size, dtype=torch.float64)
    noise.add(target, 1.0, name=name, step=step, start=start)
    return target


@pytest.mark.parametrize("secure", [False, True])
def test_noise_is_normal(secure: bool) -> None:
    drawn = field(Noise(root_from(3), secure=secure), 2**18)
    size = drawn.numel()
    assert abs(float(drawn.mean())) < 4 / math.sqrt(size)
    assert abs(float(drawn.std()) - 1) < 4 / math.sqrt(2 * size)
    assert abs(float((drawn**4).mean()) - 3) < 4 * math.sqrt(96 / size)
    # The share beyond every multiple of the standard deviation.
    for limit in (0.5, 1.0, 2.0, 3.0):
        share = float((drawn.abs() > limit).double().mean())
        exact = math.erfc(limit / math.sqrt(2))
        assert abs(share - exact) < 5 * math.sqrt(exact / size), limit
    neighbours = float((drawn[1:] * drawn[:-1]).mean())
    assert abs(neighbours) < 4 / math.sqrt(size)


@pytest.mark.parametrize("secure", [False, True])
def test_any_range_is_a_part_of_the_whole(secure: bool) -> None:
    noise = Noise(root_from(1), secure=secure)
    whole = field(noise, 3 * BLOCK + 7)
    cuts = (0, 1, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 100, 3 * BLOCK + 7)
    for start, stop in pairwise(cuts):
        part = field(noise, stop - start, start=start)
        assert torch.equal(part, whole[start:stop])


def test_name_step_root_and_block_all_change_it() -> None:
    noise = Noise(root_from(1))
    fields = [
        field(noise, BLOCK),
        field(noise, BLOCK, name="v"),
        field(noise, BLOCK, step=2),
        field(noise, BLOCK, start=BLOCK),
        field(Noise(root_from(2)), BLOCK),
        field(Noise(root_from(1), secure=True), BLOCK),
        # Names and numbers do not run into one another.
        field(noise, BLOCK, name="1|w", step=1),
        field(noise, BLOCK, name="w", step=11),
    ]
    for number, one in enumerate(fields):
        for other in fields[number + 1 :]:
            assert abs(float((one * other).mean())) < 5 / math.sqrt(BLOCK)


def test_it_is_scaled_and_added() -> None:
    noise = Noise(root_from(1))
    target = torch.full((10,), 100.0)
    noise.add(target, 0.5, name="w", step=1, start=3)
    drawn = torch.zeros(10)
    noise.add(drawn, 1.0, name="w", step=1, start=3)
    assert torch.allclose(target, 100 + 0.5 * drawn)


def test_the_root_is_the_operating_systems() -> None:
    torch.manual_seed(0)
    one = fresh_root()
    torch.manual_seed(0)
    other = fresh_root()
    assert one != other
    assert len(one) == 32
    assert root_from(5) == root_from(5) != root_from(6)


def test_seeds_of_others_do_not_change_it_and_are_not_used_up() -> None:
    noise = Noise(root_from(1))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    one = field(noise, 100)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    assert torch.equal(field(noise, 100), one)


def test_a_print_does_not_show_the_root() -> None:
    root = root_from(1)
    assert root.hex() not in repr(vars(Noise(root))["_source"])
    assert "root" not in repr(Noise(root))
