"""A plan that trains wrongly on two layers is refused, on all ranks, by what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

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


def _kinds_of(name: str) -> Any:
    """A model whose mixture begins after two dense layers, or with parameters in its MLP."""
    settings: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    mixture = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
    }
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(**settings, **(mixture if name == "Dots1" else {}))
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


@with_mesh
def _found(_ctx: Context, mesh: Any, name: str) -> dict[str, Style]:
    model = _kinds_of(name)
    plan = plan_for(model)
    found = verify_plan(model, plan, mesh)
    assert not found.guessed
    return {pattern: found.rules[pattern] for pattern in plan.guessed}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Dots1", {"model.layers.*.mlp.gate.weight": Style.REPLICATED}),
        (
            "Apertus",
            {
                "model.layers.*.mlp.act_fn.alpha_p": Style.PARTIAL,
                "model.layers.*.mlp.act_fn.alpha_n": Style.PARTIAL,
            },
        ),
    ],
)
def test_how_gradients_arise_is_found_out(name: str, expected: dict[str, Style]) -> None:
    """A router beside a dense MLP is whole; numbers inside of an activation see a share."""
    for found in run_ranks(_found, 2, name):
        assert expected.items() <= found.items()


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
