"""What stands for a missing layer returns what the layer would, with the hidden states only."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.template import Place, fill_template, make_template

H, OTHER = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("returned", "path", "expected"),
    [
        (H, (), Place.HIDDEN),
        ((H,), (0,), (Place.HIDDEN,)),
        ((H, OTHER, None, 3), (0,), (Place.HIDDEN, None, None, 3)),
        ([OTHER, H], (1,), [None, Place.HIDDEN]),
        ({"a": H, "b": (OTHER,)}, ("a",), {"a": Place.HIDDEN, "b": None}),
        (((OTHER, H), OTHER), (0, 1), ((None, Place.HIDDEN), None)),
    ],
)
def test_templates(returned: Any, path: tuple[Any, ...], expected: Any) -> None:
    assert make_template(returned, path, "layer") == expected


def test_filling_puts_the_hidden_states_back() -> None:
    template = make_template((H, OTHER, {"x": 1}), (0,), "layer")
    hidden, other, rest = fill_template(template, OTHER)
    assert hidden is OTHER
    assert other is None
    assert rest is None


def test_what_cannot_be_rebuilt_is_refused() -> None:
    with pytest.raises(PlanError, match=r"layers\.3 returns a OrderedDict"):
        make_template(OrderedDict(a=H), ("a",), "layers.3")
