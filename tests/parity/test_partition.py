"""However layers are shared out and whatever schedule is chosen, the training is the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.grid import Case, assert_parity

SMALL = ("example_shape", (2, 12))


@pytest.mark.parametrize(
    "pipeline",
    [
        (("partition", "time"), SMALL),
        (("partition", "memory"), SMALL),
        (("partition", [1, 3]),),
    ],
    ids=lambda pipeline: str(pipeline[0][1]),
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_partition(family: Any, pipeline: tuple[Any, ...]) -> None:
    assert_parity(Case(family=family, pp=2, tied=family == "gpt2", steps=3, pipeline=pipeline))


@pytest.mark.parametrize(
    "mesh", [{"pp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 4}], ids=str
)
def test_a_chosen_schedule(mesh: dict[str, int]) -> None:
    assert_parity(Case(schedule="auto", steps=3, pipeline=(SMALL,), **mesh))


def test_a_v_by_memory_with_whole_stages_computed_again() -> None:
    pipeline = (("partition", "memory"), ("recompute", "full"), SMALL)
    assert_parity(Case(schedule="ZBVZeroBubble", pp=2, steps=3, pipeline=pipeline))
