"""A plan that is planted with an error is not taken, whatever the error is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from goose_strategy.errors import PlanError
from goose_strategy.models.choose import choose_plan
from goose_strategy.models.trial import Trial, build_clone
from goose_strategy.tensor_parallel.config import TensorConfig
from goose_strategy.tensor_parallel.plan import Style
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.harness.zoo import zoo_model
from tests.tensor_parallel.helpers import with_mesh

C, R, P, N = Style.COLUMN, Style.ROW, Style.PARTIAL, Style.REPLICATED
BERT, OLMO = "bert.encoder.layer.*", "model.layers.*.self_attn"
# For each model: what is changed in the plan that was found, and what the verdict must say.
PLANTED: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "BertLMHeadModel": {
        "right": ({}, "^$"),
        "query and output swapped": (
            {f"{BERT}.attention.self.query": R, f"{BERT}.attention.output.dense": C},
            "does not|run|off",
        ),
        "bias of the head whole": ({"cls.predictions.bias": N}, "share a weight"),
        "row layer not summed": ({f"{BERT}.output.dense": N}, "run|off"),
    },
    "OpenAIGPTLMHeadModel": {
        "right": ({}, "^$"),
        "fused without seams": ({"packed": {}}, "is .* off"),
        "seams at other places": (
            {"packed": {"transformer.h.*.attn.c_attn": (1, 2, 3)}},
            "run|off",
        ),
        "heads not divided": ({"counts": {}}, "run|off"),
    },
    "HunYuanDenseV1ForCausalLM": {
        "right": ({}, "^$"),
        "norm of the keys not summed": ({f"{OLMO}.key_layernorm.weight": N}, "key_layernorm.* off"),
        "norm of the queries summed twice": ({"model.norm.weight": P}, r"norm\.weight is .* off"),
    },
    "Olmo2ForCausalLM": {
        "right": ({}, "^$"),
        # Each rank would take the mean square of its own half of the features.
        "norm over all heads of a cut": (
            {
                **{f"{OLMO}.{name}_proj": C for name in "qkv"},
                **{f"{OLMO}.{name}_norm.weight": C for name in "qk"},
                f"{OLMO}.o_proj": R,
            },
            "is .* off",
        ),
    },
}


@with_mesh
def _verdicts(_ctx: Context, mesh: Any, name: str) -> dict[str, str]:
    model = zoo_model(name)
    plan = choose_plan(model, mesh, TensorConfig())
    trial = Trial(model, mesh)
    found = {}
    for label, (changes, _) in PLANTED[name].items():
        fields = {key: value for key, value in changes.items() if key in ("packed", "counts")}
        rules = {key: value for key, value in changes.items() if key not in fields}
        verdict = trial.judge(replace(plan, rules={**plan.rules, **rules}, **fields))
        found[label] = verdict.reason
    return found


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_planted_errors_are_found(name: str) -> None:
    for found in run_ranks(_verdicts, 2, name):
        for label, (_, pattern) in PLANTED[name].items():
            assert re.search(pattern, found[label]), (label, found[label])


@with_mesh
def _refusal(_ctx: Context, mesh: Any, vocab: int) -> str:
    config = transformers.GemmaConfig(
        vocab_size=vocab, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, pad_token_id=0,
    )  # fmt: skip
    try:
        Trial(transformers.GemmaForCausalLM(config), mesh)
    except PlanError as error:
        return str(error)
    return "taken"


def test_a_trial_in_which_nothing_is_learned_proves_nothing() -> None:
    for text in run_ranks(_refusal, 2, 1):
        assert "gradients of norm 0.0" in text


def test_a_clone_has_every_kind_of_layer_and_no_more() -> None:
    torch.manual_seed(0)
    assert len(_layers(zoo_model("BertLMHeadModel"))) == 2
    # The last of its four layers is the first of its kind.
    model: Any = zoo_model("BambaForCausalLM")
    kinds = {type(part) for part in model.modules()}
    assert {type(part) for part in build_clone(model).modules()} == kinds


def _layers(model: Any) -> Any:
    clone: Any = build_clone(model)
    assert not clone.training
    assert all(param.requires_grad for param in clone.parameters())
    return clone.bert.encoder.layer
