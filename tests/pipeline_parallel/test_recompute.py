"""Which modules are computed again, and that they are, with any arguments."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache

from goose_strategy.errors import BatchError, PlanError
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.microbatch import split_batch
from goose_strategy.pipeline_parallel.recompute import (
    Recomputed,
    choose_modules,
    recompute_modules,
)
from tests.harness.models import tiny_model
from tests.pipeline_parallel.cases import batch_of, model_of, reference, toy
from tests.pipeline_parallel.threads import make_pipeline


@pytest.mark.parametrize(
    ("family", "stack"), [("llama", "model.layers"), ("gpt2", "transformer.h")]
)
def test_layers_are_found(family: Any, stack: str) -> None:
    names = choose_modules(tiny_model(family), "layer")
    assert names == [f"{stack}.{number}" for number in range(4)]


def test_names_with_and_without_numbers() -> None:
    model = tiny_model("llama")
    assert choose_modules(model, ["model.layers.*.mlp", "lm_head"], staged=True) == [
        *(f"model.layers.{number}.mlp" for number in range(4)),
        "lm_head",
    ]
    assert choose_modules(model, ["model.layers.2.mlp"]) == ["model.layers.2.mlp"]
    assert choose_modules(model, ["model.layers.*"]) == choose_modules(model, "layer")
    assert choose_modules(model, ["model"]) == ["model"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["layers.*.mlp"], r"'layers\.\*\.mlp' is the name of no module.* model\.layers\.\*\.mlp,"),
        (["model.layers"], r"model\.layers is a ModuleList, which is never called"),
        (
            ["model.layers.*", "model.layers.1.mlp"],
            r"model\.layers\.1\.mlp is a part of model\.layers\.1, and would be computed a third",
        ),
        (["model"], "model holds all layers, and ends on each stage"),
    ],
)
def test_wrong_names_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        choose_modules(tiny_model("llama"), names, staged=True)


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(PlanError, match="Linear has no stack of layers"):
        choose_modules(nn.Linear(2, 2), "layer")


def test_a_model_that_checkpoints_itself_is_refused() -> None:
    model: Any = tiny_model("llama")
    enable = "activation_checkpointing_enable"
    (getattr(model, enable, None) or model.gradient_checkpointing_enable)()
    with pytest.raises(PlanError, match=r"recompute='layer', but .*own gradient checkpointing is"):
        choose_modules(model, "layer")


def counted_calls(model: nn.Module) -> Counter[str]:
    """Count the calls of the linear layers, which nothing here wraps."""
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    return calls


@pytest.mark.parametrize("names", ["layer", ["model.layers.*.mlp"]])
def test_what_is_chosen_is_computed_twice_and_the_rest_once(names: Any) -> None:
    model = model_of("llama")
    batch = batch_of(3)
    loss, gradients = reference(model, [batch])
    restore = recompute_modules(model, choose_modules(model, names))
    calls = counted_calls(model)
    again, second = reference(model, [batch])
    assert torch.equal(loss, again)
    assert all(torch.equal(second[name], grad) for name, grad in gradients.items())
    # The last product of a recomputation is not needed.
    assert calls["model.layers.1.mlp.up_proj"] == 2
    assert calls["model.layers.1.self_attn.q_proj"] == (2 if names == "layer" else 1)
    assert calls["lm_head"] == 1
    calls.clear()
    restore()
    reference(model, [batch])
    assert set(calls.values()) == {1}
    assert all("forward" not in vars(module) for module in model.modules())


def test_without_gradients_nothing_is_computed_again() -> None:
    model = model_of("llama")
    recompute_modules(model, choose_modules(model, "layer"))
    with torch.no_grad():
        output = model(input_ids=batch_of(2)["input_ids"], use_cache=True)
    caches = [value for value in output.values() if isinstance(value, DynamicCache)]
    assert [cache.get_seq_length() for cache in caches] == [12]
    with pytest.raises(BatchError, match="would write into a cache of keys and values twice"):
        model(input_ids=batch_of(2)["input_ids"], use_cache=True)


@pytest.mark.parametrize("names", ["layer", ["model.layers.*.mlp", "lm_head"]])
def test_stages(names: Any) -> None:
    model = model_of("llama")
    pipeline = make_pipeline(model, 3)
    for part in pipeline.parts:
        recompute_modules(part.module, choose_modules(model, names), absent=part.absent)
    parts = split_batch(batch_of(5), PipelineConfig(num_microbatches=3), stages=3)
    calls = [counted_calls(stage.module) for stage in pipeline.stages]
    (*_, last) = pipeline.run(parts, train=True)
    loss, gradients = reference(model, parts)
    assert torch.equal(last.loss, loss)
    mine = pipeline.gradients()
    assert all(torch.equal(mine[name], gradient) for name, gradient in gradients.items())
    for stage, count in zip(pipeline.stages, calls, strict=True):
        for layer in stage.layers:
            assert count[f"model.layers.{layer}.mlp.up_proj"] == 6


class Noisy(nn.Module):
    """Takes everything by keyword, drops, and keeps a running mean that it subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, *, x: Tensor, pair: tuple[Tensor, int]) -> Tensor:
        hidden = torch.tanh(self.linear(x - self.mean)) * pair[0]
        self.mean.add_(x.detach().mean(0), alpha=0.1)
        return functional.dropout(hidden, 0.5).sin() * pair[1]


def trained(module: Any, *, backwards: int) -> dict[str, Tensor]:
    torch.manual_seed(3)
    x = torch.randn(5, 4, requires_grad=True)
    pair = (torch.randn(5, 4, requires_grad=True), 2)
    outputs = [module(x=x, pair=pair), module(x=x, pair=pair)]
    for _ in range(backwards):
        for output in outputs:
            output.sum().backward(retain_graph=True)
    found = {name: p.grad for name, p in module.named_parameters()}
    return {**found, "x": x.grad, "pair": pair[0].grad, "mean": module.mean.clone()}


@pytest.mark.parametrize("backwards", [1, 2])
def test_buffers_masks_and_keywords_are_replayed(backwards: int) -> None:
    module = Noisy()
    wrapped = copy.deepcopy(module)
    Recomputed(wrapped)
    expected, mine = (trained(one, backwards=backwards) for one in (module, wrapped))
    assert all(torch.equal(mine[name], value) for name, value in expected.items())


def test_a_copy_computes_with_its_own_weights() -> None:
    module = Noisy()
    Recomputed(module)
    copied = copy.deepcopy(module)
    with torch.no_grad():
        copied.linear.weight.zero_()
        copied.linear.bias.zero_()
    x = torch.randn(2, 4)
    assert not copied(x=x, pair=(x, 1)).any()
    assert module(x=x, pair=(x, 1)).abs().sum() > 0 or not x.any()
    assert copied.mean.data_ptr() != module.mean.data_ptr()


def test_a_forward_that_was_replaced_before_is_put_back() -> None:
    module = toy().layers[0]
    own = module.forward
    vars(module)["forward"] = lambda hidden: own(hidden) * 2
    replaced = module.forward
    wrapper = Recomputed(module)
    assert module.forward is not replaced
    wrapper.remove()
    assert module.forward is replaced
    assert inspect.ismethod(own)


@pytest.mark.parametrize("buffers", [False, True])
def test_compiled_layers(buffers: bool) -> None:
    model = model_of("llama", layers=2)
    for layer in model.model.layers:
        if buffers:
            layer.register_buffer("unused", torch.zeros(1))
    batch = batch_of(2)
    _, gradients = reference(model, [batch])
    recompute_modules(model, choose_modules(model, "layer"))
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend)
    _, again = reference(model, [batch])
    # With buffers there is a context around the module, for which torch has no graph.
    assert (len(graphs) > 0) == (not buffers)
    assert all(torch.equal(again[name], gradient) for name, gradient in gradients.items())
    torch.compiler.reset()
