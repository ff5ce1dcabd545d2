"""Work is what the matrices cost, and the cut of it is the best there is."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from goose_strategy.pipeline_parallel.balance import Work, balance, count_work
from goose_strategy.pipeline_parallel.probe import probe_model

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


@pytest.mark.parametrize(
    ("work", "stages", "counts"),
    [
        (Work(0, (1,) * 8, 3), 4, [2, 2, 3, 1]),
        (Work(0, (1,) * 8, 0), 4, [2, 2, 2, 2]),
        (Work(0, (1,) * 10, 0), 4, [2, 2, 3, 3]),
        (Work(4, (1,) * 8, 0), 2, [2, 6]),
        (Work(0, (1,) * 4, 100), 4, [1, 1, 1, 1]),
        # Shapes of Llama-3-8B, in units of 2**20: a layer 208, the head 501.
        (Work(0, (208,) * 32, 501), 4, [8, 9, 9, 6]),
        (Work(0, (5, 1, 1, 1, 5), 0), 3, [1, 3, 1]),
    ],
)
def test_balance(work: Work, stages: int, counts: list[int]) -> None:
    assert balance(work, stages) == counts


def _costs(work: Work, counts: tuple[int, ...]) -> list[int]:
    bounds = [0, *itertools.accumulate(counts)]
    costs = [sum(work.layers[a:b]) for a, b in itertools.pairwise(bounds)]
    costs[0] += work.before
    costs[-1] += work.after
    return costs


def test_no_cut_is_better() -> None:
    draw = random.Random(7)
    for _ in range(200):
        layers = draw.randint(1, 8)
        stages = draw.randint(1, layers)
        work = Work(
            draw.randint(0, 6), tuple(draw.randint(0, 6) for _ in range(layers)), draw.randint(0, 9)
        )
        every = [
            counts
            for counts in itertools.product(range(1, layers + 1), repeat=stages)
            if sum(counts) == layers
        ]

        def order(counts: tuple[int, ...], work: Work = work) -> tuple[int, int, tuple[int, ...]]:
            costs = _costs(work, counts)
            return max(costs), sum(cost * cost for cost in costs), counts

        assert tuple(balance(work, stages)) == min(every, key=order)
