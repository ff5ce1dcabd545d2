"""The tokens that a global batch learns from, counted once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from goose_strategy.runtime.counting import SampleSwitch, TokenCount
from tests.harness.models import batches, rows_of
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import mesh_of

LABELS = torch.tensor([[5, -100, 6, 7], [-100, -100, 8, -100]])


def test_the_first_label_of_a_row_is_no_target() -> None:
    # Row 0 has the targets 6 and 7 (5 is never predicted), row 1 has 8.
    assert TokenCount.of([{"labels": LABELS}], None).wait().item() == 3


def test_shifted_labels_are_targets_all() -> None:
    batch = {"labels": LABELS, "shift_labels": LABELS}
    assert TokenCount.of([batch], None).wait().item() == 4


def test_microbatches_count_together() -> None:
    count = TokenCount.of([{"labels": LABELS}, {"labels": LABELS[:1]}], None)
    assert count.wait().item() == 5
    assert count.wait().item() == 5


def test_nothing_to_learn_is_one_and_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"Every label of the global batch is -100: the loss is 0"):
        count = TokenCount.of([{"labels": torch.full((2, 3), -100)}], None)
    assert count.wait().item() == 1


def _over_replicas(ctx: Context) -> dict[str, Any]:
    whole = batches(1)[0]
    with mesh_of(dp=2) as mesh:
        mine = TokenCount.of([rows_of(whole, ctx.rank, 2)], mesh.dp)
        blank = {"labels": torch.full((1, 3), -100)}
        half = TokenCount.of([blank if ctx.rank else {"labels": LABELS}], mesh.dp)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values = [count.wait().item() for count in (mine, half, half)]
            warned = [len(caught)]
            values.append(TokenCount.of([blank], mesh.dp).wait().item())
            warned.append(len(caught))
    return {"values": values, "warned": warned}


def test_replicas_count_together() -> None:
    alone = TokenCount.of(batches(1), None).wait().item()
    assert run_ranks(_over_replicas, 2) == [
        {"values": [alone, 3, 3, 1], "warned": [0, 1]},
        {"values": [alone, 3, 3, 1], "warned": [0, 1]},
    ]


def test_a_private_call_is_known_inside_of_it_only() -> None:
    switch = SampleSwitch()
    assert not switch()
    with switch.inside():
        with switch.inside():
            assert switch()
        assert switch()
    assert not switch()
