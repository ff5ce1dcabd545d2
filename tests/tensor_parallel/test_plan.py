from __future__ import annotations

from dataclasses import replace

import pytest

from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.plan import Attention, Style, TensorPlan, generic_name

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
    assert PLAN.fitted(tp) is PLAN


def test_a_size_that_does_not_fit_lists_those_that_do() -> None:
    with pytest.raises(PlanError, match=r"tp=3 does not divide kv_heads=4.*work: 1, 2, 4\.") as e:
        PLAN.fitted(3)
    assert "heads=12" not in str(e.value).replace("kv_heads", "")
    assert e.value.axis == "tp"


GROUPED = replace(
    PLAN,
    rules={**PLAN.rules, "model.layers.*.mlp.up": Style.COLUMN},
    islands={**PLAN.islands, "model.layers.*.mlp": "x"},
    divisible={"heads": 12, "kv_heads": 2, "width": 24},
    attention=Attention(
        module="model.layers.*.attn", heads="heads", kv_heads="kv_heads", key_value=("k", "v")
    ),
)


@pytest.mark.parametrize("tp", [1, 2])
def test_heads_that_fit_are_cut(tp: int) -> None:
    assert GROUPED.fitted(tp) is GROUPED


@pytest.mark.parametrize("tp", [4, 6, 12])
def test_fewer_key_heads_than_ranks_stay_whole(tp: int) -> None:
    plan = GROUPED.fitted(tp)
    assert plan.style_of("model.layers.0.attn.k") is Style.KEY_VALUE
    assert plan.style_of("model.layers.0.attn.v") is Style.KEY_VALUE
    assert plan.style_of("model.layers.0.attn.q") is Style.COLUMN
    assert plan.whole_style("model.layers.0.attn.k.weight") is Style.PARTIAL
    assert plan.kv_heads == 2
    assert "kv_heads" not in plan.divisible


def test_heads_that_do_not_fit_are_refused_with_the_way_out() -> None:
    message = (
        r"tp=8 does not divide heads=12, kv_heads=2.*work: 1, 2, 4, 6, 12; or keep attention whole "
        r"with TensorConfig\(allow_replicated_attention=True\)"
    )
    with pytest.raises(PlanError, match=message):
        GROUPED.fitted(8)
    with pytest.raises(
        PlanError, match=r"tp=5 does not divide width=24 .*work: 1, 2, 3, 4, 6, 8, 12, 24"
    ):
        replace(GROUPED, whole_attention=True).fitted(5)


def test_fused_key_heads_cannot_stay_whole_alone() -> None:
    fused = replace(GROUPED, attention=replace(GROUPED.attention, key_value=()))
    with pytest.raises(PlanError, match=r"work: 1, 2; or keep"):
        fused.fitted(4)


def test_attention_stays_whole_where_that_is_allowed() -> None:
    plan = replace(GROUPED, whole_attention=True).fitted(8)
    assert plan.style_of("model.layers.0.attn.q") is None
    assert plan.style_of("model.layers.0.mlp.up") is Style.COLUMN
    assert plan.island_argument("model.layers.0.attn") is None
    assert plan.island_argument("model.layers.0.mlp") == "x"
    assert plan.whole_style("model.layers.0.attn.q.weight") is Style.REPLICATED
    assert plan.divisible == {"width": 24}


def test_matrices_side_by_side_are_found_for_every_layer() -> None:
    plan = replace(PLAN, packed={"model.layers.*.attn.q": (2, 1, 1)})
    assert plan.packed_of("model.layers.3.attn.q") == (2, 1, 1)
    assert plan.packed_of("model.layers.3.attn.o") == ()
