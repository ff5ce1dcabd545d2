"""A stage is the model itself with only its own weights, and a chain of stages is the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import PlanError, ScheduleError
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.stage import ModelPart, PipelineStage, StageExit, cut_model
from tests.pipeline_parallel.cases import Toy, batch_of, model_of, toy, toy_batch


def parts_of(model: nn.Module, bounds: tuple[int, ...], example: Any = None) -> list[ModelPart]:
    info = probe_model(model, example)
    return [cut_model(copy.deepcopy(model), info, bounds, rank) for rank in range(len(bounds) - 1)]


def cut(model: nn.Module, bounds: tuple[int, ...], example: Any = None) -> list[PipelineStage]:
    return [part.stages[0] for part in parts_of(model, bounds, example)]


def chain(stages: list[PipelineStage], batch: dict[str, Any]) -> Any:
    passed: Any = ()
    for stage in stages:
        passed = stage.forward(batch, passed)
    return passed


def owned_bytes(module: nn.Module) -> int:
    """Bytes of every storage that a module's tensors hold, parameters or not."""
    storages = {}
    for part in module.modules():
        values = [*part._parameters.values(), *part._buffers.values(), *vars(part).values()]
        for value in values:
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3", "gpt2", "bloom", "opt"])
@pytest.mark.parametrize("bounds", [(0, 4), (0, 2, 4), (0, 1, 3, 4)])
def test_a_chain_of_stages_is_the_model(family: str, bounds: tuple[int, ...]) -> None:
    model = model_of(family)
    batch = batch_of(3)
    expected = model(**batch, use_cache=False)
    output = chain(cut(model, bounds), batch)
    assert type(output) is type(expected)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)


@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_has_its_own_parameters_under_their_names(tied: bool) -> None:
    model = model_of("llama", tied=tied)
    whole = dict(model.named_parameters())
    seen = []
    for part in parts_of(model, (0, 1, 3, 4)):
        assert type(part.module) is type(model)
        assert set(part.module.state_dict()) >= set(dict(part.module.named_parameters()))
        for name, param in part.module.named_parameters():
            canonical = part.tied_copies.get(name, name)
            assert torch.equal(param, whole[canonical])
            seen.append(canonical)
    copies = ["model.embed_tokens.weight"] if tied else []
    assert sorted(seen) == sorted([*whole, *copies])


def test_tied_copies_are_named_on_both_ends() -> None:
    parts = parts_of(model_of("llama", tied=True), (0, 1, 3, 4))
    name = "model.embed_tokens.weight"
    assert [part.tied for part in parts] == [{name: name}, {}, {"lm_head.weight": name}]
    assert [part.tied_copies for part in parts] == [{}, {}, {"lm_head.weight": name}]
    assert all(not part.tied for part in parts_of(model_of("llama"), (0, 2, 4)))


def test_what_is_not_there_costs_no_memory() -> None:
    model = model_of("llama", vocab=5000)
    total = owned_bytes(model)
    for stage in cut(model, (0, 1, 3, 4)):
        own = sum(p.numel() * p.element_size() for p in stage.module.parameters())
        assert owned_bytes(stage.module) < own + 4096
        assert own < 0.6 * total


def test_a_stage_follows_its_model_to_another_type() -> None:
    stages = cut(model_of("llama"), (0, 2, 4))
    for stage in stages:
        stage.module.to(torch.float32)
    output = chain(stages, batch_of(2))
    assert output.logits.dtype == torch.float32


def test_what_travels_is_described() -> None:
    first, last = cut(model_of("llama"), (0, 2, 4))
    assert first.cut_in == last.cut_out == ()
    assert first.cut_out == last.cut_in
    assert first.cut_out[0].dtype == torch.float64
    assert repr(last) == "PipelineStage(1 of 2, layers 2 to 3)"


def test_the_runtime_may_replace_the_models_forward() -> None:
    model = model_of("llama")
    batch = batch_of(2)
    expected = model(**batch, use_cache=False).logits
    stages = cut(model, (0, 2, 4))
    for stage in stages:
        stage.module.forward = None
    assert torch.equal(chain(stages, batch).logits, expected)


def test_only_the_last_stage_sees_labels_and_no_stage_keeps_a_cache() -> None:
    seen: list[set[str]] = []

    class Watching(Toy):
        def forward(self, input_ids: Any, labels: Any = None, **kwargs: Any) -> Any:
            seen.append({"labels"} if labels is not None else set(kwargs))
            return super().forward(input_ids, labels)

    model = Watching().double()
    stages = cut(model, (0, 2, 4), {"input_ids": toy_batch()["input_ids"]})
    seen.clear()
    batch = {**toy_batch(), "return_dict": False}
    chain(stages, batch)
    assert seen == [set(), {"labels"}]


def test_hooks_of_present_layers_see_what_was_received() -> None:
    model = model_of("llama")
    seen: dict[str, Tensor] = {}
    for name, layer in model.model.layers.named_children():
        layer.register_forward_pre_hook(
            lambda _m, args, name=name: seen.__setitem__(name, args[0].detach().clone())
        )
    batch = batch_of(2)
    model(**batch, use_cache=False)
    expected = dict(seen)
    stages = cut(model, (0, 1, 3, 4))
    passed: Any = ()
    for stage, names in zip(stages, (["0"], ["1", "2"], ["3"]), strict=True):
        seen.clear()
        passed = stage.forward(batch, passed)
        assert sorted(seen) == names
        for name in names:
            assert torch.equal(seen[name], expected[name])


def test_a_copy_of_a_stage_is_a_stage_of_its_own() -> None:
    stages = cut(model_of("llama"), (0, 2, 4))
    batch = batch_of(2)
    expected = chain(stages, batch).logits
    twins = copy.deepcopy(stages)
    with torch.no_grad():
        for stage in stages:
            for param in stage.module.parameters():
                param.zero_()
    assert torch.equal(chain(twins, batch).logits, expected)


def test_a_wrong_number_of_tensors_is_refused() -> None:
    _, last = cut(model_of("llama"), (0, 2, 4))
    with pytest.raises(ScheduleError, match=r"received 0 tensors, the stage takes 1. \[stage 1\]"):
        last.forward(batch_of(2))


def test_a_forward_that_returns_early_is_refused() -> None:
    class Impatient(Toy):
        def forward(self, input_ids: Any, labels: Any = None) -> Any:
            if len(input_ids) == 1:
                return self.embed(input_ids)
            return super().forward(input_ids, labels)

    first, _ = cut(Impatient().double(), (0, 2, 4), {"input_ids": toy_batch()["input_ids"]})
    with pytest.raises(ScheduleError, match="the model returned before layer 2"):
        first.forward(toy_batch(1))


def test_the_end_of_a_stage_is_no_exception_to_a_model() -> None:
    assert not issubclass(StageExit, Exception)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    ("habit", "what"),
    [
        ("middle_skip", "the model's head depends on"),
        ("running_sum", "the model's head depends on"),
        ("filled", r"layers\.2 takes shared\['first'\], which they fill"),
    ],
)
def test_a_way_around_the_cut_is_refused_on_every_rank(stage: int, habit: str, what: str) -> None:
    model = toy(habit)
    info = probe_model(model, {"input_ids": toy_batch()["input_ids"]})
    with pytest.raises(PlanError, match=rf"cut before layers\.2: .*{what}"):
        cut_model(model, info, (0, 2, 4), stage)
