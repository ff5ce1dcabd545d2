"""A plan that trains wrongly on two layers is refused, on all ranks, by what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from goose_strategy.errors import PlanError
from goose_strategy.models.registry import plan_for
from goose_strategy.models.verify import verify_plan
from goose_strategy.tensor_parallel.plan import Style
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import with_mesh

EVERY = ("bloom", "falcon", "gemma", "gpt2", "gpt_neox", "llama", "mixtral", "opt", "phi3", "qwen3")


@with_mesh
def _verdict(_ctx: Context, mesh: Any, family: Any, changes: dict[str, Any]) -> str:
    model: Any = tiny_model(family, dtype=torch.float32)
    before = torch.get_rng_state()
    plan = plan_for(model)
    rules = {**plan.rules, **changes.pop("rules", {})}
    try:
        verify_plan(model, replace(plan, rules=rules, **changes), mesh)
    except PlanError as error:
        return str(error)
    assert torch.equal(before, torch.get_rng_state())
    assert model.config.num_hidden_layers == len(model.base_model.get_submodule(_stack(family)))
    return "right"


def _stack(family: str) -> str:
    return {"opt": "decoder.layers", "gpt2": "h", "bloom": "h", "falcon": "h"}.get(family, "layers")


@pytest.mark.parametrize("family", EVERY)
def test_the_plans_of_the_proved_families_pass(family: str) -> None:
    assert run_ranks(_verdict, 2, family, {}) == ["right"] * 2


QK = "model.layers.*.self_attn"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {"rules": {f"{QK}.q_norm": Style.REPLICATED}}, r"q_norm\.weight is .* off"),
        ("mixtral", {"rules": {"model.layers.*.mlp.experts": Style.REPLICATED}}, "right"),
        ("phi3", {"packed": {}}, "is .* off"),
        ("gpt2", {"attention": None}, "does not run: "),
    ],
    ids=["share not summed", "experts whole", "fused as one", "heads not divided"],
)
def test_what_trains_wrongly_is_refused(family: str, changes: dict[str, Any], message: str) -> None:
    found = run_ranks(_verdict, 2, family, changes)
    assert any(re.search(message, text) for text in found)
    assert message == "right" or all(f"family {family!r} does not" in text for text in found)
