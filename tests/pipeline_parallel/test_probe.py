"""The probe finds every model's stack, leaves nothing behind, and refuses what cannot be cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.probe import call_settings, find_stack, probe_model
from tests.pipeline_parallel.cases import OTHERS, Toy, model_of, toy, toy_batch

EXAMPLE = {"input_ids": toy_batch()["input_ids"]}


@pytest.mark.parametrize(
    ("family", "stack"),
    [
        ("llama", "model.layers"),
        ("qwen2", "model.layers"),
        ("mistral", "model.layers"),
        ("qwen3", "model.layers"),
        ("gpt2", "transformer.h"),
        ("bloom", "transformer.h"),
        ("opt", "model.decoder.layers"),
    ],
)
def test_families_send_only_hidden_states(family: str, stack: str) -> None:
    info = probe_model(model_of(family))
    assert info.stack == stack
    assert info.num_layers == 4
    for boundary in range(1, 4):
        (sent,) = info.cut(boundary)
        assert sent.path == (0,)
        assert sent.shape == (2, 8, 32)
        assert sent.dtype == torch.float64
        assert sent.differentiable
        info.check_stage(boundary, 4)


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = model_of("llama")
    model.model.layers[1].requires_grad_(False)
    model.model.layers[2].eval()
    before = copy.deepcopy(model)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    probe_model(model)
    assert torch.equal(torch.get_rng_state(), state)
    for (name, module), twin in zip(model.named_modules(), before.modules(), strict=True):
        assert module.training == twin.training, name
        assert vars(module).keys() == vars(twin).keys(), name
        for table in ("_forward_hooks", "_forward_pre_hooks"):
            assert len(getattr(module, table)) == len(getattr(twin, table)), name
    for (name, param), twin in zip(model.named_parameters(), before.parameters(), strict=True):
        assert param.requires_grad == twin.requires_grad, name
        assert param.grad is None
        assert torch.equal(param, twin)


def test_frozen_models_are_probed_alike() -> None:
    model = model_of("llama")
    trained = probe_model(model)
    assert probe_model(model.requires_grad_(False)) == trained


def test_the_probe_works_without_gradients_and_with_dropout_and_checkpointing() -> None:
    model = model_of("llama", attention_dropout=0.5)
    expected = probe_model(model)
    model.activation_checkpointing_enable()
    with torch.no_grad():
        assert probe_model(model) == expected


def test_a_model_on_the_meta_device_is_probed() -> None:
    assert probe_model(model_of("llama").to("meta")).cut(2)[0].shape == (2, 8, 32)


def test_several_tensors_of_any_kind_are_carried() -> None:
    info = probe_model(toy("pair"), EXAMPLE)
    sent = {tensor.path: tensor for tensor in info.cut(2)}
    assert list(sent) == [(0,), ("extra", 0), ("extra", 1)]
    assert [tensor.differentiable for tensor in sent.values()] == [True, True, False]
    assert info.injections(2, 2) == {(0,): 0, ("extra", 0): 1, ("extra", 1): 2}
    # The same embeddings and mask go into every later layer, other hidden states do not.
    assert info.injections(2, 3) == {("extra", 0): 1, ("extra", 1): 2}


def test_a_mask_made_from_hidden_states_between_layers_is_carried() -> None:
    """It has no gradient and no layer returned it: only the replay shows that it must be sent."""

    class Chooser(Toy):
        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            hidden = self.embed(input_ids)
            for layer in self.layers:
                chosen = (hidden.detach().sum(-1, keepdim=True) > 0).long()
                hidden, _ = layer(hidden, extra=(hidden, chosen))
            return self.head(self.norm(hidden))

    info = probe_model(Chooser().double(), EXAMPLE)
    assert [tensor.path for tensor in info.cut(1)] == [(0,), ("extra", 1)]


def test_the_outermost_list_with_the_most_parameters_is_the_stack() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.ModuleList([nn.Linear(2, 2)])
            self.blocks = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8)] * 3) for _ in range(2)])

    assert find_stack(Model()) == "blocks"


def test_no_stack() -> None:
    with pytest.raises(PlanError, match=r"Sequential has no stack of layers.*Use pp=1"):
        probe_model(nn.Sequential(nn.Linear(2, 2)), EXAMPLE)


@pytest.mark.parametrize(
    ("habit", "message"),
    [
        ("looped", r"\['layers\.1'\] run more than once in a forward"),
        ("reversed", r"run in the order \[3, 2, 1, 0\], not each once from 0 to 3"),
    ],
)
def test_layers_must_run_once_and_in_order(habit: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        probe_model(toy(habit), EXAMPLE)


def test_inputs_that_do_not_fit_are_named() -> None:
    with pytest.raises(PlanError, match=r"Toy has no config\.vocab_size.*use pp=1"):
        probe_model(toy())
    with pytest.raises(PlanError, match=r"Toy does not run on the probe's inputs \['wrong'\]"):
        probe_model(toy(), {"wrong": 3})


def test_a_model_that_needs_its_layers_is_refused() -> None:
    class Checker(Toy):
        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            hidden = self.embed(input_ids)
            for layer in self.layers:
                hidden, made = layer(hidden, extra=(hidden, hidden), make_mask=True)
                made.sum()
            return self.head(hidden)

    with pytest.raises(PlanError, match="Checker does not run on the probe's inputs"):
        probe_model(Checker().double(), EXAMPLE)


def test_no_cache_is_kept() -> None:
    assert call_settings(model_of("llama")) == {"use_cache": False}
    assert call_settings(OTHERS["bloom"]()) == {"use_cache": False}
    assert call_settings(toy()) == {}
