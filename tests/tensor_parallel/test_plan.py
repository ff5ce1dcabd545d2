from __future__ import annotations

import pytest

from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.plan import Style, TensorPlan, divisors, generic_name

PLAN = TensorPlan(
    family="llama",
    rules={
        "model.layers.*.attn.q": Style.COLUMN,
        "model.layers.*.attn.o": Style.ROW,
        "model.layers.*.attn.gate": Style.REPLICATED,
        "model.layers.*.mlp.scale": Style.PARTIAL,
    },
    islands={"model.layers.*.attn": "hidden_states"},
    divisible={"heads": 12, "kv_heads": 4},
)


@pytest.mark.parametrize(
    ("name", "generic"),
    [
        ("model.layers.3.mlp", "model.layers.*.mlp"),
        ("h.10", "h.*"),
        ("0.weight", "*.weight"),
        ("layers.0.blocks.12.w1", "layers.*.blocks.*.w1"),
        ("conv1d.weight2", "conv1d.weight2"),
        ("", ""),
    ],
)
def test_layer_numbers_become_stars(name: str, generic: str) -> None:
    assert generic_name(name) == generic


def test_rules_are_found_for_every_layer() -> None:
    assert PLAN.style_of("model.layers.7.attn.q") is Style.COLUMN
    assert PLAN.style_of("model.layers.7.attn.q.weight") is None
    assert PLAN.island_argument("model.layers.7.attn") == "hidden_states"
    assert PLAN.island_argument("model.layers.7.mlp") is None


@pytest.mark.parametrize(
    ("parameter", "style"),
    [
        ("model.layers.0.attn.q_norm.weight", Style.PARTIAL),
        ("model.layers.0.attn.gate.weight", Style.REPLICATED),
        # A row layer's bias is added after the sum, although it lies inside the island.
        ("model.layers.0.attn.o.bias", Style.REPLICATED),
        ("model.layers.0.mlp.scale", Style.PARTIAL),
        ("model.layers.0.mlp.scale.weight", Style.PARTIAL),
        ("model.layers.0.norm.weight", Style.REPLICATED),
        ("weight", Style.REPLICATED),
    ],
)
def test_the_closest_rule_tells_how_a_gradient_arises(parameter: str, style: Style) -> None:
    assert PLAN.whole_style(parameter) is style


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_sizes_that_fit(tp: int) -> None:
    PLAN.check(tp)


def test_a_size_that_does_not_fit_lists_those_that_do() -> None:
    with pytest.raises(PlanError, match=r"tp=3 does not divide kv_heads=4.*work: 1, 2, 4\.") as e:
        PLAN.check(3)
    assert "heads=12" not in str(e.value).replace("kv_heads", "")
    assert e.value.axis == "tp"


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
