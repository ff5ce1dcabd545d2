"""Numbers become those of one rank, and only what has an entry per head is sliced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.counts import (
    ConfigView,
    argument_places,
    divide_counts,
    local_heads,
    set_count,
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.config: Any = SimpleNamespace(num_attention_heads=4, kind="sdpa")

    def forward(self, hidden_states: Tensor, alibi: Tensor, mask: Tensor) -> Tensor:
        return hidden_states + alibi + mask


def test_numbers_are_divided_and_put_back() -> None:
    module = Attention()
    config = module.config
    undo = divide_counts("attn", module, ("num_heads", "config.num_attention_heads"), 2)
    assert (module.num_heads, module.config.num_attention_heads) == (2, 2)
    assert config.num_attention_heads == 4, "the model's own config is saved with it"
    config.kind = "eager"
    assert module.config.kind == "eager"
    for put_back in undo:
        put_back()
    assert module.num_heads == 4
    assert module.config is config
    set_count(module, "num_heads", 1)()
    assert module.num_heads == 4


@pytest.mark.parametrize("name", ["num_heads", "config.num_attention_heads", "split_size"])
def test_numbers_that_tp_does_not_divide_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match=rf"tp=3 does not divide attn\.{name}="):
        divide_counts("attn", Attention(), (name,), 3)


def test_a_view_has_no_special_methods_of_its_own() -> None:
    view = ConfigView(SimpleNamespace(), {})
    with pytest.raises(AttributeError):
        view.__deepcopy__  # noqa: B018


def test_heads_are_sliced_where_there_is_one_entry_for_each() -> None:
    place = {"rows": 2, "heads": 4, "tp": 2, "index": 1}
    per_head = torch.arange(2 * 4 * 1 * 3).view(8, 1, 3)
    expected = per_head.view(2, 4, 1, 3)[:, 2:]
    assert torch.equal(local_heads(per_head, **place), expected.reshape(4, 1, 3))
    assert torch.equal(local_heads(per_head.view(2, 4, 1, 3), **place), expected)
    shared = torch.zeros(2, 1, 5, 5)
    assert local_heads(shared, **place) is shared
    assert local_heads(None, **place) is None


def test_arguments_are_found_by_place() -> None:
    assert argument_places(Attention(), ("alibi", "mask")) == {"alibi": 1, "mask": 2}
    with pytest.raises(PlanError, match=r"Attention.forward has no argument 'bias'"):
        argument_places(Attention(), ("bias",))
