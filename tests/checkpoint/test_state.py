from __future__ import annotations

import pytest
import torch

from goose_strategy.checkpoint.state import divide_writing, merged_groups, optimizer_objects
from goose_strategy.errors import CheckpointError


def test_writing_is_divided_by_size_and_by_name_where_sizes_are_equal() -> None:
    sizes = {"a": 5, "b": 9, "c": 5, "d": 1}
    assert divide_writing(sizes, 2) == {"b": 0, "a": 1, "c": 1, "d": 0}
    assert divide_writing(dict(reversed(sizes.items())), 2) == divide_writing(sizes, 2)


def test_groups_of_all_stages_become_those_of_one_process() -> None:
    first = [{"lr": 0.1, "params": ["embed", "a"]}, {"lr": 0.2, "params": ["a.norm"]}]
    last = [{"lr": 0.1, "params": ["b", "embed"]}, {"lr": 0.2, "params": []}]
    order = {"embed": 0, "a": 1, "a.norm": 2, "b": 3}
    assert merged_groups([first, last], order) == [
        {"lr": 0.1, "params": ["embed", "a", "b"]},
        {"lr": 0.2, "params": ["a.norm"]},
    ]
    with pytest.raises(CheckpointError, match=r"different numbers of parameter groups: \[1, 2\]"):
        merged_groups([first, last[:1]], order)


def test_names_come_in_the_order_of_one_process() -> None:
    first, last = [{"params": ["embed", "layer.0"]}], [{"params": ["norm", "layer.1", "embed"]}]
    order = {"embed": 0, "norm": 1, "layer.0": 2, "layer.1": 3}
    (merged,) = merged_groups([first, last], order)
    assert merged["params"] == ["embed", "norm", "layer.0", "layer.1"]


def test_a_learning_rate_may_be_a_tensor() -> None:
    objects = optimizer_objects("optimizer", [{"lr": torch.tensor(0.1), "params": []}])
    assert objects.keys() == {
        ("optimizer", "param_groups", 0, "lr"),
        ("optimizer", "param_groups", 0, "params"),
    }
