from __future__ import annotations

import math
from fractions import Fraction

import torch

from cuda_ops.reference.roots import root32, root64


def test_root64_is_the_nearest_number() -> None:
    generator = torch.Generator().manual_seed(0)
    powers = torch.rand(3000, dtype=torch.float64, generator=generator) * 500 - 250
    values = 10.0**powers
    expected = [math.sqrt(value) for value in values.tolist()]
    assert root64(values).tolist() == expected
    for value, root in zip(values[:20].tolist(), expected, strict=False):
        below, above = math.nextafter(root, 0), math.nextafter(root, math.inf)
        middle = (Fraction(root) + Fraction(below)) / 2, (Fraction(root) + Fraction(above)) / 2
        assert middle[0] ** 2 <= Fraction(value) <= middle[1] ** 2


def test_root32_is_the_nearest_number() -> None:
    values = torch.rand(20000, generator=torch.Generator().manual_seed(1))
    expected = [math.sqrt(value) for value in values.tolist()]
    assert root32(values).tolist() == torch.tensor(expected, dtype=torch.float64).float().tolist()


def test_special_values() -> None:
    values = torch.tensor([0.0, math.inf, -1.0, math.nan])
    for root in (root32(values), root64(values.double())):
        assert root[:2].tolist() == [0.0, math.inf]
        assert bool(root[2:].isnan().all())
