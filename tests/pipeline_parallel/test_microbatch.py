"""Batches are cut along their rows, whatever else they hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from goose_strategy.errors import BatchError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.microbatch import (
    _warn_few_rows,
    count_rows,
    precision_of,
    signature_of,
    split_batch,
    trim_right_padding,
)


@pytest.fixture(autouse=True)
def _fresh_warnings() -> Iterator[None]:
    _warn_few_rows.cache_clear()
    yield
    _warn_few_rows.cache_clear()


def split(batch: Any, number: int | None = None, **options: Any) -> list[dict[str, Any]]:
    return split_batch(batch, PipelineConfig(num_microbatches=number, **options), stages=2)


def ids(rows: int, columns: int = 6) -> torch.Tensor:
    return torch.arange(rows * columns).reshape(rows, columns)


def test_rows_are_cut_into_parts_of_almost_equal_size() -> None:
    parts = split({"input_ids": ids(7)}, 3)
    assert [len(part["input_ids"]) for part in parts] == [3, 2, 2]
    assert torch.equal(torch.cat([part["input_ids"] for part in parts]), ids(7))


def test_what_has_no_rows_goes_to_every_part() -> None:
    batch = {
        "input_ids": ids(4),
        "position_ids": torch.arange(6)[None],
        "cache_position": torch.arange(4),
        "num_items_in_batch": torch.tensor(9),
        "labels": None,
        "logits_to_keep": 2,
        "return_dict": True,
    }
    for part in split(batch, 2):
        assert part["input_ids"].shape == (2, 6)
        for name in ("position_ids", "cache_position", "num_items_in_batch"):
            assert torch.equal(part[name], batch[name])
        assert part["labels"] is None
        assert part["logits_to_keep"] == 2


def test_masks_of_four_dimensions_are_cut_or_shared() -> None:
    per_row, shared = torch.zeros(4, 1, 6, 6), torch.zeros(1, 1, 6, 6)
    assert split({"input_ids": ids(4), "attention_mask": per_row}, 2)[0][
        "attention_mask"
    ].shape == (
        2,
        1,
        6,
        6,
    )
    assert split({"input_ids": ids(4), "attention_mask": shared}, 2)[1]["attention_mask"] is shared


def test_rows_elsewhere_than_in_front_are_refused() -> None:
    with pytest.raises(BatchError, match=r"position_ids has shape \(3, 4, 6\).*has 4 rows"):
        split({"input_ids": ids(4), "position_ids": torch.zeros(3, 4, 6)}, 2)


def test_fewer_rows_than_microbatches_warn_once() -> None:
    with pytest.warns(UserWarning, match="num_microbatches=4 but the batch has only 3 rows"):
        assert len(split({"input_ids": ids(3)}, 4)) == 3
    # Warnings are errors here: a second one would fail.
    assert len(split({"input_ids": ids(3)}, 4)) == 3


def test_the_default_number_fits_any_batch_without_a_warning() -> None:
    assert len(split({"input_ids": ids(3)})) == 3
    assert len(split({"input_ids": ids(30)})) == 4


def test_a_list_is_taken_as_it_is() -> None:
    parts = [{"input_ids": ids(2, 5)}, {"input_ids": ids(1, 9)}]
    out = split(parts, 7)
    assert [part["input_ids"].shape for part in out] == [(2, 5), (1, 9)]
    assert out[0] is not parts[0]


def test_empty_batches_are_refused() -> None:
    with pytest.raises(BatchError, match="list of microbatches is empty"):
        split([])
    with pytest.raises(BatchError, match="The batch is empty"):
        split({"input_ids": ids(0)})
    with pytest.raises(BatchError, match=r"no tensor with rows; it holds \['labels'\]"):
        split({"labels": None})


def test_rows_are_counted_by_the_ids_first() -> None:
    assert count_rows({"position_ids": torch.zeros(1, 6), "input_ids": ids(5)}) == 5
    assert count_rows({"pixel_values": torch.zeros(3, 2, 2)}) == 3


def masked(lengths: list[int], columns: int = 6) -> torch.Tensor:
    return (torch.arange(columns)[None] < torch.tensor(lengths)[:, None]).long()


def test_right_padding_is_dropped_per_microbatch() -> None:
    mask = masked([6, 2, 3, 1])
    labels = torch.where(mask.bool(), ids(4), -100)
    batch = {
        "input_ids": ids(4),
        "attention_mask": mask,
        "labels": labels,
        "position_ids": torch.arange(6)[None],
    }
    first, second = split(batch, 2, trim_padding=True)
    assert first["input_ids"].shape == (2, 6)
    assert {name: tuple(value.shape) for name, value in second.items()} == {
        "input_ids": (2, 3),
        "attention_mask": (2, 3),
        "labels": (2, 3),
        "position_ids": (1, 3),
    }
    assert torch.equal(second["input_ids"], ids(4)[2:, :3])
    assert second["input_ids"].is_contiguous()


def test_labels_keep_their_columns() -> None:
    labels = torch.full((2, 6), -100)
    labels[1, 4] = 7
    out = trim_right_padding({"attention_mask": masked([2, 1]), "labels": labels})
    assert out["labels"].shape == (2, 5)


def test_left_padding_and_unknown_padding_stay() -> None:
    left = masked([2, 3]).flip(1)
    assert trim_right_padding({"attention_mask": left})["attention_mask"].shape == (2, 6)
    assert trim_right_padding({"input_ids": ids(2)})["input_ids"].shape == (2, 6)
    four = torch.zeros(2, 1, 6, 6)
    assert trim_right_padding({"attention_mask": four})["attention_mask"] is four


def test_a_microbatch_of_padding_keeps_one_column() -> None:
    out = trim_right_padding({"attention_mask": masked([0, 0]), "input_ids": ids(2)})
    assert out["input_ids"].shape == (2, 1)


def test_shapes_of_messages_do_not_hang_on_labels() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    batch = {"labels": ids, "input_ids": ids, "scale": 2, "attention_mask": ids[:, :1]}
    assert signature_of(batch) == (("attention_mask", (2, 1)), ("input_ids", (2, 3)))


def test_the_precision_is_that_of_the_running_autocast() -> None:
    batch = [{"name": "first"}, {"input_ids": torch.zeros(1)}]
    assert precision_of(batch) == ("cpu", "")
    with torch.autocast("cpu", torch.bfloat16):
        assert precision_of(batch) == ("cpu", "torch.bfloat16")
