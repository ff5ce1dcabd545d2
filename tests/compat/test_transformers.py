"""Names of transformers that goose-strategy uses. A failure here says what moved upstream."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from goose_strategy.compat import transformers as compat
from goose_strategy.errors import PlanError
from tests.harness.models import FAMILIES, batches, tiny_model


def _llama(**settings: Any) -> Any:
    return tiny_model("llama", layers=1, dtype=torch.float32, **settings)


def _bart() -> nn.Module:
    config = transformers.BartConfig(
        d_model=8, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8, vocab_size=9,
        encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=8,
    )  # fmt: skip
    model: nn.Module = transformers.BartForCausalLM(config)
    return model


def test_without_transformers_no_module_is_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _llama()
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    assert not compat.is_pretrained(model)
    assert not compat.is_causal_lm(model)
    assert compat.pretrained_models(model) == []


def test_models_are_known_by_modeling_utils_pretrained_model() -> None:
    assert compat.is_pretrained(_llama())
    assert not compat.is_pretrained(nn.Linear(1, 1))


def test_the_outermost_models_are_found() -> None:
    inner, other = _llama(), _llama()
    tree = nn.ModuleDict({"head": nn.Linear(1, 1), "a": nn.ModuleDict({"lm": inner}), "b": other})
    assert compat.pretrained_models(tree) == [("a.lm", inner), ("b", other)]
    assert compat.pretrained_models(inner) == [("", inner)]
    assert compat.pretrained_models(nn.Linear(1, 1)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_causal_lm_is_known_by_loss_utils_for_causal_lm_loss(family: Any) -> None:
    assert compat.is_causal_lm(tiny_model(family, layers=1))


def test_other_models_are_no_causal_lms() -> None:
    config = transformers.LlamaConfig(
        vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, num_labels=2,
    )  # fmt: skip
    assert not compat.is_causal_lm(transformers.LlamaForSequenceClassification(config))
    # Its loss_type says ForCausalLM, but its forward computes the loss on the spot.
    assert not compat.is_causal_lm(_bart())
    assert not compat.is_causal_lm(nn.Linear(1, 1))
    own = _llama()
    own.loss_function = lambda **_: torch.tensor(0.0)
    assert not compat.is_causal_lm(own)


def test_a_loss_is_installed_through_the_loss_function_setter() -> None:
    model: Any = _llama()
    (batch,) = batches(1)
    seen: dict[str, Any] = {}

    def loss(**kwargs: Any) -> Tensor:
        seen.update(kwargs)
        total: Tensor = kwargs["logits"].sum() * 0 + 42
        return total

    restore = compat.install_loss(model, loss)
    assert compat.loss_function_of(model) is loss
    output = model(**batch, num_items_in_batch=torch.tensor(5), use_cache=False)
    assert output.loss.item() == 42
    # What the runtime relies on: keywords, and extra ones passed through.
    assert {"logits", "labels", "vocab_size", "num_items_in_batch"} <= seen.keys()
    restore()
    assert compat.is_causal_lm(model)


def test_restoring_brings_back_a_loss_of_the_user() -> None:
    model = _llama()

    def mine(**_: Any) -> Tensor:
        return torch.tensor(1.0)

    model.loss_function = mine
    restore = compat.install_loss(model, lambda **_: torch.tensor(2.0))
    restore()
    assert compat.loss_function_of(model) is mine


def test_a_model_that_takes_no_loss_is_refused() -> None:
    class Deaf(nn.Linear):
        @property
        def loss_function(self) -> str:
            return "fixed"

        @loss_function.setter
        def loss_function(self, value: object) -> None:
            del value

    with pytest.raises(PlanError, match="model=Deaf"):
        compat.install_loss(Deaf(1, 1), lambda **_: None)


def test_the_loss_calls_what_ours_replaces() -> None:
    """ForCausalLMLoss shifts once, ignores -100, and divides by num_items_in_batch."""
    model = _llama()
    (batch,) = batches(1, padded=False)
    labels = batch["labels"]
    logits = model(input_ids=batch["input_ids"]).logits.float()
    total = nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum"
    )
    theirs = model.loss_function(logits=logits, labels=labels, vocab_size=97, num_items_in_batch=7)
    assert torch.isclose(theirs, total / 7)


def test_calls_are_bound_to_the_names_of_the_class() -> None:
    model = _llama()
    ids, mask = torch.zeros(1, 2), torch.ones(1, 2)
    model.forward = None  # a patched instance does not matter
    bound = compat.bind_call(model, (ids, mask), {"labels": ids, "num_items_in_batch": 3})
    assert bound.keys() == {"input_ids", "attention_mask", "labels", "num_items_in_batch"}
    assert bound["attention_mask"] is mask
    with pytest.raises(TypeError, match=r"got \['input_ids'\] twice"):
        compat.bind_call(model, (ids,), {"input_ids": ids})
    with pytest.raises(TypeError, match=r"LlamaForCausalLM\.forward takes"):
        compat.bind_call(model, (ids,) * 40, {})


def test_return_dict_is_read_from_the_call_and_the_config() -> None:
    model = _llama()
    assert compat.returns_output(model, {})
    assert not compat.returns_output(model, {"return_dict": False})
    model.config.return_dict = False
    assert not compat.returns_output(model, {})
    assert compat.returns_output(model, {"return_dict": True})
    model.config.return_dict = True
    assert isinstance(model(batches(1)[0]["input_ids"], return_dict=False), tuple)


def test_logits_are_replaced_in_a_model_output() -> None:
    loss, logits = torch.tensor(1.0), torch.ones(1, 2, 3)
    output = CausalLMOutputWithPast(loss=loss, logits=logits)
    assert compat.replace_logits(output, lambda same: same) is output
    doubled = compat.replace_logits(output, lambda x: x * 2)
    assert type(doubled) is CausalLMOutputWithPast
    assert doubled.loss is loss
    assert torch.equal(doubled.logits, logits * 2)
    without = compat.replace_logits(output, lambda _: None)
    assert (list(without.keys()), without.logits) == (["loss"], None)
    for other in ((loss, logits), None, CausalLMOutputWithPast(loss=loss)):
        assert compat.replace_logits(other, lambda _: None) is other


def test_the_plan_and_config_are_read_by_their_names() -> None:
    model = _llama()
    plan = compat.tensor_plan(model)
    assert plan["model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.layers.*.mlp.down_proj"] == "rowwise"
    assert plan["lm_head"] in ("colwise_gather_output", "colwise_rep")
    qwen3 = compat.tensor_plan(tiny_model("qwen3", layers=1))
    assert qwen3["model.layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"
    assert compat.tensor_plan(nn.Linear(1, 1)) == {}
    assert compat.model_type(model) == "llama"
    assert compat.model_type(nn.Linear(1, 1)) == "Linear"
    assert compat.config_size(model, "num_key_value_heads") == 2
    assert compat.config_size(model, "model_type") is None
    assert compat.config_size(nn.Linear(1, 1), "hidden_size") is None


def test_embedding_head_and_base_are_found_by_their_accessors() -> None:
    model = _llama()
    assert compat.input_embedding(model) == ("model.embed_tokens", model.model.embed_tokens)
    assert compat.output_embedding(model) == ("lm_head", model.lm_head)
    assert compat.output_embedding(model.model) is None
    assert compat.input_embedding(nn.Linear(1, 1)) is None
    assert compat.base_prefix(model) == "model."
    assert compat.base_prefix(model.model) == ""
    assert compat.base_prefix(nn.Linear(1, 1)) == ""


def test_ties_are_found_by_identity_and_as_promised() -> None:
    tied, plain = _llama(tied=True), _llama()
    tie = {"lm_head.weight": "model.embed_tokens.weight"}
    assert compat.tied_parameters(tied) == compat.promised_ties(tied) == tie
    assert compat.tied_parameters(plain) == compat.promised_ties(plain) == {}
    assert compat.promised_ties(nn.Linear(1, 1)) == {}


def test_rotary_frequencies_are_computed_buffers() -> None:
    model = _llama()
    found = compat.non_persistent_float_buffers(nn.ModuleDict({"lm": model}))
    rotary = model.model.rotary_emb
    assert ("inv_freq", rotary.inv_freq) in [(name, buffer) for _, name, buffer in found]
    assert all(owner is rotary for owner, _, _ in found)
    plain = nn.BatchNorm1d(2)
    plain.register_buffer("scratch", torch.zeros(1), persistent=False)
    assert [name for _, name, _ in compat.non_persistent_float_buffers(plain)] == ["scratch"]


def test_models_that_compute_their_loss_on_the_spot_are_known_by_their_code() -> None:
    bart: Any = _bart()
    assert compat.computes_own_loss(bart)
    assert not compat.is_causal_lm(bart)
    assert not compat.computes_own_loss(tiny_model("llama", layers=1))
    assert not compat.computes_own_loss(bart.model)


def test_the_bias_of_a_head_is_found_where_it_is_held_twice() -> None:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=8, is_decoder=True,
    )  # fmt: skip
    assert compat.head_bias_holders(transformers.BertLMHeadModel(config)) == [
        "cls.predictions.bias"
    ]
    assert compat.head_bias_holders(tiny_model("llama", layers=1)) == []


def test_a_small_clone_has_all_kinds_of_layers_or_is_none() -> None:
    model: Any = tiny_model("qwen3", layers=3)
    clone: Any = compat.small_clone(model, 2)
    assert (clone.config.num_hidden_layers, model.config.num_hidden_layers) == (2, 3)
    model.config.layer_types = ["full_attention", "full_attention", "sliding_attention"]
    assert compat.small_clone(model, 2) is None
    # What a class does not take is no clone either.
    config = transformers.GPTNeoConfig(
        hidden_size=8, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
    )
    assert compat.small_clone(transformers.GPTNeoForCausalLM(config), 1) is None


def test_sizes_of_text_are_found_inside_of_a_config_of_several_inputs() -> None:
    model = nn.Module()
    model.config = transformers.Gemma3Config(text_config={"num_hidden_layers": 3})
    assert compat.text_size(model, "num_hidden_layers") == 3
    assert compat.text_size(model, "no_such_size") is None
    assert compat.text_size(tiny_model("llama", layers=1), "vocab_size") == 97
