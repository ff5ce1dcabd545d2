"""Work is what the matrices cost."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from goose_strategy.pipeline_parallel.balance import Work, count_work, model_parts
from goose_strategy.pipeline_parallel.minmax import Load
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.tables.chunks import Chunks

SMALL = {
    "vocab_size": 96,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_llama_costs_its_matrices(tied: bool, device: str) -> None:
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 40
    # Neither the lookup nor the norm counts; the head does, also where it is the embedding.
    assert count_work(model, probe_model(model)) == Work(0, (layer,) * 3, 96 * 16)


def test_experts_count_as_far_as_a_token_meets_them() -> None:
    config = MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config)
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 2 * 3 * 16 * 40 + 8 * 16
    assert count_work(model, probe_model(model)).layers == (layer,) * 3


def test_position_embeddings_cost_nothing() -> None:
    config = GPT2Config(vocab_size=96, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    model = AutoModelForCausalLM.from_config(config)
    assert count_work(model, probe_model(model)) == Work(0, (12 * 16 * 16,) * 2, 96 * 16)


def test_the_first_stage_has_the_front_and_the_last_one_the_head() -> None:
    work = Work(2, (5, 6), 9)
    assert work.load(3) == Load((5, 6), (2, 0, 9))
    assert work.load(1) == Load((5, 6), (11,))


@pytest.mark.parametrize("tied", [False, True])
def test_the_parameters_of_every_part(tied: bool) -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    parts = model_parts(model, probe_model(model))
    numbers = parts.work(torch.nn.Parameter.numel)
    layer = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 40 + 2 * 16
    assert numbers == Work(96 * 16, (layer,) * 3, 16 + 96 * 16)
    # In a V the first and the last stage are on one rank, which holds a tied weight once.
    assert parts.held_by(Chunks(2)) == parts
    v = parts.held_by(Chunks(1, 2, "v")).work(torch.nn.Parameter.numel)
    assert v.after == 16 + 96 * 16 * (not tied)
