"""Layers are compiled in place, and what cannot be compiled is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from goose_strategy.compat.torch import is_compiled
from goose_strategy.errors import ConfigError, PlanError
from goose_strategy.pipeline_parallel.compiled import (
    check_backend,
    check_compiled,
    compile_layers,
    refuse_split,
)
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.stage import cut_model
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE
from tests.pipeline_parallel.cases import batch_of, model_of, reference

CONFIG = PipelineConfig()


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    torch.compiler.reset()


def test_layers_are_compiled_and_put_back() -> None:
    model = model_of("llama")
    batch = batch_of(2)
    loss, gradients = reference(model, [batch])
    names = [name for name, _ in model.named_parameters()]
    hooks: list[bool] = []
    model.model.layers[1].register_forward_hook(
        lambda *_: hooks.append(torch.compiler.is_compiling())
    )
    restore = compile_layers(model, "aot_eager", absent=["model.layers.3"])
    compiled = ["forward" in vars(layer) for layer in model.model.layers]
    assert compiled == [True, True, True, False]
    torch._dynamo.utils.counters.clear()
    again, compiled_gradients = reference(model, [batch])
    # All of a kind share one graph.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-12, atol=1e-14)
    assert hooks == [False]
    assert [name for name, _ in model.named_parameters()] == names
    restore()
    assert not any("forward" in vars(layer) for layer in model.model.layers)


def test_what_the_user_compiled_is_left_as_it_is() -> None:
    model = model_of("llama")
    model.model.layers[0].compile(backend="eager")

    def other(hidden: Any) -> Any:
        return hidden

    vars(model.model.layers[1])["forward"] = other
    restore = compile_layers(model, "eager")
    assert "forward" not in vars(model.model.layers[0])
    restore()
    assert model.model.layers[1].forward is other


def test_an_unknown_backend_is_refused() -> None:
    check_backend(compile_layers=False)
    check_backend(compile_layers=True)
    check_backend("aot_eager")
    with pytest.raises(ConfigError, match=r"'fast' is no backend of torch\.compile; .*'inductor'"):
        check_backend("fast")
    with pytest.raises(ConfigError, match="'fast' is no backend"):
        check_compiled(model_of("llama"), PipelineConfig(compile_layers="fast"), pp=1, tp=1)


@pytest.mark.parametrize("schedule", CATALOGUE)
def test_schedules_that_put_weight_gradients_off_are_refused(schedule: str) -> None:
    if not CATALOGUE[schedule].splits:
        refuse_split(schedule, "this")
        return
    with pytest.raises(ConfigError, match=f"this does not work with schedule='{schedule}'.*1F1B"):
        refuse_split(schedule, "this")
    model = model_of("llama")
    model.model.layers[2].mlp.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"model\.layers\.2\.mlp\.compile\(\) does not work wi"):
        check_compiled(model, PipelineConfig(schedule=schedule), pp=2, tp=1)
    check_compiled(model, PipelineConfig(schedule=schedule), pp=1, tp=2)
    check_compiled(model, PipelineConfig(schedule="auto"), pp=2, tp=1)


def test_a_wrapper_in_the_place_of_a_layer_is_refused() -> None:
    model = model_of("llama")
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    check_compiled(model, CONFIG, pp=1, tp=1)
    for sizes in ({"pp": 2, "tp": 1}, {"pp": 1, "tp": 2}):
        with pytest.raises(PlanError, match=r"model\.layers\.1 was replaced by torch\.compile"):
            check_compiled(model, CONFIG, **sizes)


def test_what_holds_the_layers_ends_in_the_middle() -> None:
    model = model_of("llama")
    # The model's own call: the schedule is behind it.
    model.compile(backend="eager")
    check_compiled(model, CONFIG, pp=2, tp=1)
    model.model.compile(backend="eager")
    with pytest.raises(PlanError, match="model is compiled, but holds all layers"):
        check_compiled(model, CONFIG, pp=2, tp=1)
    check_compiled(model, CONFIG, pp=1, tp=2)


def test_a_model_without_layers_has_none_to_compile() -> None:
    with pytest.raises(PlanError, match="has no stack of layers"):
        check_compiled(nn.Linear(1, 1), PipelineConfig(compile_layers=True), pp=1, tp=1)


def test_layers_of_other_ranks_are_not_compiled() -> None:
    """What stands for them ends forwards by an exception, which is no graph."""
    model = model_of("llama")
    for layer in model.model.layers:
        layer.compile(backend="eager")
    cut_model(model, probe_model(model), (0, 2, 4), 1)
    assert [is_compiled(layer) for layer in model.model.layers] == [False, False, True, True]
