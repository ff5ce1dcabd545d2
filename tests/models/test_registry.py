from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from goose_strategy.errors import PlanError
from goose_strategy.models.registry import FAMILIES, plan_for, supported_families
from goose_strategy.tensor_parallel.config import TensorConfig
from goose_strategy.tensor_parallel.plan import Style
from tests.harness.compare import assert_close_named, assert_close_numbers, reference_run
from tests.harness.models import randomise, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import Step, awkward_batch, cut, one_step, whole, with_mesh

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}


def _other(name: str, **settings: Any) -> nn.Module:
    """A model of a family without a file here."""
    config = getattr(transformers, f"{name}Config")(**{**TINY, **settings})
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).double()
    for module in model.modules():
        if isinstance(getattr(module, "residual_dropout", None), float):
            module.residual_dropout = 0.0  # type: ignore[assignment]
    randomise(model)
    return model.train()


LLAMA_LIKE = ("gemma", "llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("family", LLAMA_LIKE)
@pytest.mark.parametrize("tied", [False, True])
def test_plans_of_the_proved_families(family: Any, tied: bool) -> None:
    plan = plan_for(tiny_model(family, layers=1, tied=tied))
    layer = "model.layers.*."
    expected = {
        "model.embed_tokens": Style.VOCAB,
        "lm_head": Style.HEAD,
        **{f"{layer}self_attn.{name}_proj": Style.COLUMN for name in "qkv"},
        f"{layer}self_attn.o_proj": Style.ROW,
        f"{layer}mlp.gate_proj": Style.COLUMN,
        f"{layer}mlp.up_proj": Style.COLUMN,
        f"{layer}mlp.down_proj": Style.ROW,
    }
    if family == "qwen3":
        expected |= {f"{layer}self_attn.{name}_norm": Style.PARTIAL for name in "qk"}
    assert plan.rules == expected
    assert plan.islands == {f"{layer}self_attn": "hidden_states", f"{layer}mlp": "x"}
    assert plan.divisible == {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    }
    assert (plan.family, plan.gather_logits) == (family, False)


def test_island_arguments_are_those_of_the_forward() -> None:
    """If transformers renames them, the copy into the island would miss its tensor."""
    for name, family in FAMILIES.items():
        model: Any = tiny_model(name, layers=1)  # type: ignore[arg-type]
        for pattern, argument in family.islands.items():
            module = model.base_model.get_submodule(pattern.replace("*", "0"))
            first = list(inspect.signature(type(module).forward).parameters)[1]
            assert first == argument, (name, pattern)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_name_of_a_family_is_in_the_model(name: Any) -> None:
    model: Any = tiny_model(name, layers=1)
    family, base = FAMILIES[name], model.base_model
    for pattern in [*family.rules, *family.packed, *family.islands, family.attention.module]:
        assert base.get_submodule(pattern.replace("*", "0")) is not None
    for sizes in [family.divisible, *family.packed.values()]:
        assert all(isinstance(getattr(model.config, size, None), int) for size in sizes), sizes
    attention = base.get_submodule(family.attention.module.replace("*", "0"))
    for number in family.attention.numbers:
        holder = attention.config if number.startswith("config.") else attention
        assert isinstance(getattr(holder, number.removeprefix("config.")), int)
    if family.attention.key_value:
        assert isinstance(getattr(attention, family.attention.groups), int)
    for argument in family.attention.sliced:
        assert argument in inspect.signature(type(attention).forward).parameters


def test_the_base_model_alone_has_a_plan_too() -> None:
    model: Any = tiny_model("qwen3", layers=1)
    plan = plan_for(model.model)
    assert plan.style_of("layers.0.self_attn.q_proj") is Style.COLUMN
    assert plan.island_argument("layers.0.mlp") == "x"
    assert Style.HEAD not in plan.rules.values()


def test_a_plan_needs_no_weights() -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    assert plan_for(model).style_of("lm_head") is Style.HEAD


def test_settings_reach_the_plan() -> None:
    config = TensorConfig(gather_logits=True, rules={"model.layers.*.mlp": "replicated"})
    plan = plan_for(tiny_model("llama", layers=1), config)
    assert plan.gather_logits
    assert plan.style_of("model.layers.3.mlp") is Style.REPLICATED


_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: transformers.MptForCausalLM(
                transformers.MptConfig(d_model=8, n_layers=1, n_heads=2, vocab_size=9)
            ),
            r"no tensor-parallel plan for the family 'mpt'.*bloom, falcon, .*, qwen3",
        ),
        (
            lambda: _other("MiniCPM3", **_LATENT),
            r"kv_a_proj_with_mqa='mla_kv_a_proj': this style of .*'minicpm3' is not supported",
        ),
        (
            lambda: tiny_model("bloom", layers=1, slow_but_exact=True),
            r"slow_but_exact=True in the config of this bloom model goes around its own layers",
        ),
    ],
    ids=["no plan", "another style", "around the layers"],
)
def test_what_is_not_supported_is_refused_by_name(model: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_for(model())


def test_what_lies_between_is_tried_out_or_refused() -> None:
    model = _other("Apertus")
    plan = plan_for(model)
    assert plan.style_of("model.layers.0.mlp.act_fn.alpha_p") is Style.PARTIAL
    assert not plan.proved
    assert plan_for(tiny_model("llama", layers=1)).proved
    message = r"mlp\.act_fn\.alpha_p lies beside the column and row layers of 'apertus'"
    with pytest.raises(PlanError, match=message):
        plan_for(model, TensorConfig(verify_plan=False))


def test_column_layers_need_a_row_layer_beside_them() -> None:
    with pytest.raises(PlanError, match="mlp of the family 'Sequential' has column layers only"):
        plan_for(nn.Sequential(nn.Linear(2, 2)), TensorConfig(rules={"mlp.up": "column"}))


@with_mesh
def _by_rules(ctx: Context, mesh: Any, derived: str) -> Step:
    model = _other(derived, **_SETTINGS[derived])
    specs = cut(model, mesh, _CONFIGS.get(derived))
    return one_step(model, specs, awkward_batch())


# Families with a plan of transformers' only, and one that needs a rule of the user's.
_SETTINGS: dict[str, dict[str, Any]] = {
    "Starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "Granite": {"logits_scaling": 4.0, "tie_word_embeddings": True},
    "Cohere": {"logit_scale": 0.25},
    "Phi": {"num_key_value_heads": 4},
    "Apertus": {},
    # Its norms of all queries and keys together need them gathered.
    "Olmo2": {},
    # Attention sinks: one number for each head.
    "GraniteSWA": {},
}
_CONFIGS = {"Apertus": TensorConfig(rules={"model.layers.*.mlp.act_fn": "partial"})}


@pytest.mark.parametrize("name", sorted(_SETTINGS))
def test_derived_plans_are_exact(name: str) -> None:
    model = _other(name, **_SETTINGS[name])
    expected = reference_run(model, [awkward_batch()])
    steps = run_ranks(_by_rules, 2, name)
    # These norms compute in fp32, so that the last bits of fp64 are lost.
    assert_close_numbers([steps[0].loss], expected.losses, 1e-7)
    assert_close_named(whole([s.gradients for s in steps]), expected.gradients[0], 1e-6)


def test_supported_families_are_sorted() -> None:
    assert supported_families() == tuple(sorted(FAMILIES))
    assert {"bloom", "gpt2", "llama", "mixtral"} < set(supported_families())
