"""Where tensors come from, as the autograd graph tells."""

from __future__ import annotations

import torch

from goose_strategy.pipeline_parallel.record import outside_stack, record_forward, trace_origins
from tests.pipeline_parallel.cases import model_of, toy, toy_batch


def test_modules_outside_the_stack() -> None:
    assert list(outside_stack(toy(), "layers")) == ["embed", "norm", "head"]
    llama = outside_stack(model_of("llama"), "model.layers")
    assert list(llama) == ["model.embed_tokens", "model.norm", "lm_head"]


def test_every_tensor_is_traced_to_the_next_known_one() -> None:
    model = toy("first_skip")
    record = record_forward(model, "layers", {"input_ids": toy_batch()["input_ids"]})
    trace_origins(model, record)
    names = record.names
    assert names == ["layers.0", "layers.1", "layers.2", "layers.3"]
    entries = [record.tokens[id(inputs[(0,)])] for inputs in record.inputs]
    for layer, token in enumerate(entries):
        reach = record.reach[token]
        if layer == 0:
            assert reach.parameters == {"embed.weight"}
            assert not reach.tensors
        else:
            before = f"layers.{layer - 1}.linear"
            assert reach.parameters == {f"{before}.weight", f"{before}.bias"}
            assert reach.tensors == {entries[layer - 1]}
    # The head adds the embeddings, which are the input of layer 0.
    assert entries[0] in record.result_reach.tensors
    assert {"norm.weight", "head.bias"} <= record.result_reach.parameters
    assert record.segments == {"embed": {0}, "norm": {4}, "head": {4}}


def test_a_weight_that_is_passed_to_a_layer_is_its_own_origin() -> None:
    model = toy("pair")
    model.scale = torch.nn.Parameter(torch.ones(8, dtype=torch.float64))
    embed = model.embed.forward
    model.embed.forward = lambda ids: embed(ids) * model.scale
    record = record_forward(model, "layers", {"input_ids": toy_batch()["input_ids"]})
    trace_origins(model, record)
    first = record.tokens[id(record.inputs[0][(0,)])]
    assert record.reach[first].parameters == {"embed.weight", "scale"}
