"""Every family, whole, against one process: losses and all gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.compat.transformers import install_loss
from goose_strategy.errors import PlanError
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.models.registry import plan_for
from goose_strategy.tensor_parallel import parallelize as room
from goose_strategy.tensor_parallel.linear import RowParallelLinear
from goose_strategy.tensor_parallel.loss import CausalLMLoss
from goose_strategy.tensor_parallel.parallelize import head_switch, parallelize, undo
from goose_strategy.tensor_parallel.plan import Style
from goose_strategy.tensor_parallel.regions import enter_island, leave_island
from tests.harness.compare import assert_close_named, assert_close_numbers
from tests.harness.models import tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import (
    Step,
    awkward_batch,
    cut,
    one_step,
    reference,
    whole,
    with_mesh,
)

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama tied": {"family": "llama", "tied": True},
    "llama biases": {"family": "llama", "attention_bias": True, "mlp_bias": True, "kv_heads": 4},
    "llama even vocabulary": {"family": "llama", "vocab": 96},
    "qwen2": {"family": "qwen2"},
    "mistral": {"family": "mistral", "sliding_window": 4},
    "qwen3": {"family": "qwen3"},
    "qwen3 tied": {"family": "qwen3", "tied": True, "attention_bias": True},
}


def _settings(case: str, tp: int, **more: Any) -> dict[str, Any]:
    """tp=4 needs four heads of each kind."""
    settings = {"layers": 2, **MODELS[case], **more}
    return settings if tp == 2 else {**settings, "heads": 8, "kv_heads": 4}


@with_mesh
def _step(ctx: Context, mesh: ParallelMesh, settings: dict[str, Any]) -> Step:
    model = tiny_model(**settings)
    specs = cut(model, mesh)
    return one_step(model, specs, awkward_batch(settings.get("vocab", 97)))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", MODELS)
def test_fp64_equals_one_process(case: str, tp: int) -> None:
    settings = _settings(case, tp)
    expected = reference(**settings)
    steps = run_ranks(_step, tp, settings)
    assert len({step.loss for step in steps}) == 1
    assert_close_numbers([steps[0].loss], expected.losses, 1e-10)
    assert_close_named(whole([s.gradients for s in steps]), expected.gradients[0], 1e-10)


@pytest.mark.parametrize("case", ["llama biases", "qwen3 tied"])
def test_fp32_is_close_to_fp64(case: str) -> None:
    settings = _settings(case, 2)
    expected = reference(**settings)
    steps = run_ranks(_step, 2, {**settings, "dtype": torch.float32})
    assert_close_numbers([steps[0].loss], expected.losses, 1e-6)
    assert_close_named(whole([s.gradients for s in steps]), expected.gradients[0], 1e-4)


@with_mesh
def _planted(ctx: Context, mesh: ParallelMesh, settings: dict[str, Any], error: str) -> Step:
    model = tiny_model(**settings)
    if error == "no copy at the entry":
        room.enter_island = lambda x, _group: x  # type: ignore[assignment]
    specs = cut(model, mesh)
    if error == "norm not summed":
        specs = {n: replace(s, tp_partial=False) for n, s in specs.items()}
    if error == "row bias on every rank":
        for module in model.modules():
            if isinstance(module, RowParallelLinear):
                module.forward = partial(_bias_before_sum, module)  # type: ignore[method-assign]
    if error == "loss scaled by tp":
        loss = model.loss_function
        model.loss_function = lambda **kwargs: loss(**kwargs) * mesh.tp_size
    try:
        return one_step(model, specs, awkward_batch())
    finally:
        room.enter_island = enter_island


def _bias_before_sum(layer: RowParallelLinear, x: Tensor) -> Tensor:
    return leave_island(nn.functional.linear(x, layer.weight, layer.bias), layer.group)


@pytest.mark.parametrize(
    ("error", "case"),
    [
        ("norm not summed", "qwen3"),
        ("no copy at the entry", "llama"),
        ("row bias on every rank", "llama biases"),
        ("loss scaled by tp", "llama"),
    ],
)
def test_planted_errors_are_seen(error: str, case: str) -> None:
    settings = _settings(case, 2)
    expected = reference(**settings)
    steps = run_ranks(_planted, 2, settings, error)
    with pytest.raises(AssertionError, match=r"differs|further than"):
        assert_close_named(whole([s.gradients for s in steps]), expected.gradients[0], 1e-4)


def _freeze(model: nn.Module) -> None:
    """All but the second layer's attention and the norms of the first."""
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1.self_attn" in name or "layers.0.input_layernorm" in name)


@with_mesh
def _frozen_step(ctx: Context, mesh: ParallelMesh, settings: dict[str, Any]) -> Step:
    model = tiny_model(**settings)
    _freeze(model)
    specs = cut(model, mesh)
    assert specs.keys() == {name for name, _ in model.named_parameters()}
    return one_step(model, specs, awkward_batch())


def test_frozen_parameters_stay_frozen() -> None:
    settings = _settings("qwen3", 2)
    expected = reference(prepare=_freeze, **settings)
    steps = run_ranks(_frozen_step, 2, settings)
    assert_close_named(whole([s.gradients for s in steps]), expected.gradients[0], 1e-10)


@with_mesh
def _checkpointed(
    ctx: Context, mesh: ParallelMesh, settings: dict[str, Any], reentrant: bool
) -> Step:
    model: Any = tiny_model(**settings)
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    specs = cut(model, mesh)
    return one_step(model, specs, awkward_batch())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    settings = _settings("qwen3", 2)
    expected = reference(**settings)
    steps = run_ranks(_checkpointed, 2, settings, reentrant)
    assert_close_named(whole([s.gradients for s in steps]), expected.gradients[0], 1e-10)


@with_mesh
def _in_bf16(ctx: Context, mesh: ParallelMesh, settings: dict[str, Any], autocast: bool) -> Step:
    model = tiny_model(**settings, dtype=torch.float32 if autocast else torch.bfloat16)
    specs = cut(model, mesh)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return one_step(model, specs, awkward_batch())


@pytest.mark.parametrize("autocast", [True, False])
def test_bf16_is_as_far_from_fp64_as_one_process_is(autocast: bool) -> None:
    settings = _settings("llama biases", 2)
    expected = reference(**settings)
    steps = run_ranks(_in_bf16, 2, settings, autocast)
    assert_close_numbers([steps[0].loss], expected.losses, 1e-2)
    assert_close_named(whole([s.gradients for s in steps]), expected.gradients[0], 1e-1)


@with_mesh
def _round_trip(ctx: Context, mesh: ParallelMesh, settings: dict[str, Any]) -> dict[str, Any]:
    model: Any = tiny_model(**settings)
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    objects = {name: id(p) for name, p in model.named_parameters()}
    classes = {name: type(module) for name, module in model.named_modules()}
    # A forward before the set-up, of which the user keeps the output.
    alive = model(**awkward_batch())
    alive.loss.backward()
    restore = room_cut(model, mesh)
    one_step(model, parallel_specs(model), awkward_batch())
    head = model.lm_head.weight is model.model.embed_tokens.weight
    undo(model)
    undo(model)
    restore()
    back = dict(model.named_parameters())
    assert head == settings["tied"]
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: id(p) for name, p in back.items()} == objects
    assert all(torch.equal(back[name], original[name]) for name in original)
    assert head_switch(model) is None
    model.zero_grad()
    again = model(**awkward_batch())
    again.loss.backward()
    assert torch.equal(again.loss, alive.loss)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def room_cut(model: nn.Module, mesh: ParallelMesh) -> Callable[[], None]:
    """Cut with the plain loss, which then works on whole logits."""
    parallelize(model, plan_for(model), mesh)
    return install_loss(model, CausalLMLoss())


def parallel_specs(model: nn.Module) -> dict[str, ShardSpec]:
    return {name: ShardSpec.replicated(name, param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_undo_gives_the_plain_model_back(tied: bool) -> None:
    settings = _settings("llama", 2, tied=tied, attention_bias=True)
    expected = reference(**settings)
    for gradients in run_ranks(_round_trip, 2, settings):
        # transformers' own loss again, which is fp32.
        assert_close_named(gradients, expected.gradients[0], 1e-5)


def test_tp_of_one_changes_nothing() -> None:
    (specs, changed) = run_ranks(_alone, 1)[0]
    assert not changed
    for name, param in tiny_model("qwen3", layers=1).named_parameters():
        spec = specs[name]
        assert (spec.tp_dim, spec.tp_partial, spec.local_shape) == (None, False, param.shape)
        assert spec.global_shape == spec.local_shape


@with_mesh
def _alone(ctx: Context, mesh: ParallelMesh) -> tuple[dict[str, ShardSpec], bool]:
    model = tiny_model("qwen3", layers=1)
    before = [(type(m), len(m._forward_pre_hooks)) for m in model.modules()]
    specs = parallelize(model, plan_for(model), mesh)
    changed = before != [(type(m), len(m._forward_pre_hooks)) for m in model.modules()]
    undo(model)
    return specs, changed


class _Placeholder(nn.Module):
    """As a pipeline leaves it: without data."""

    def __init__(self) -> None:
        super().__init__()
        self.dummy = nn.Parameter(torch.empty(0))


@with_mesh
def _stage(
    ctx: Context, mesh: ParallelMesh, owned: set[str] | None
) -> tuple[dict[str, ShardSpec], dict[str, str]]:
    model: Any = tiny_model("qwen3")
    plan = plan_for(model)
    model.model.embed_tokens = _Placeholder()
    for index in (0, 1):
        model.model.layers[index] = _Placeholder()
    specs = parallelize(model, plan, mesh, owned=owned)
    return specs, {name: type(module).__name__ for name, module in model.named_modules()}


def test_a_pipeline_stage_is_cut_where_it_has_parameters() -> None:
    specs, classes = run_ranks(_stage, 2, None)[1]
    assert classes["model.layers.0"] == classes["model.embed_tokens"] == "_Placeholder"
    assert classes["model.layers.2.self_attn.q_proj"] == "ColumnParallelLinear"
    assert specs["model.layers.3.self_attn.q_norm.weight"].tp_partial
    assert specs["lm_head.weight"].offsets == (49, 0)
    assert specs["model.layers.0.dummy"].numel == 0
    assert not any(name.startswith("model.layers.0.self_attn") for name in specs)


def test_modules_that_are_not_owned_stay_whole() -> None:
    specs, classes = run_ranks(_stage, 2, {"model.layers.3"})[0]
    assert classes["model.layers.2.mlp.down_proj"] == classes["lm_head"] == "Linear"
    assert specs["model.layers.2.mlp.down_proj.weight"].tp_dim is None
    assert specs["model.layers.3.mlp.down_proj.weight"].tp_dim == 1


@with_mesh
def _refused(
    ctx: Context, mesh: ParallelMesh, settings: dict[str, Any], how: str
) -> tuple[str, bool]:
    model: Any = tiny_model(**settings)
    plan = plan_for(model)
    if how == "quantised":
        model.model.layers[1].mlp.down_proj = nn.Bilinear(2, 2, 2)
    if how == "uneven":
        plan = replace(plan, divisible={})
    if how == "tied to a whole head":
        plan = replace(plan, rules={**plan.rules, "lm_head": Style.REPLICATED})
    if how == "twice":
        parallelize(model, plan, mesh)
    shapes = [param.shape for param in model.parameters()]
    with pytest.raises(PlanError) as caught:
        parallelize(model, plan, mesh)
    return str(caught.value), shapes == [param.shape for param in model.parameters()]


@pytest.mark.parametrize(
    ("how", "settings", "message"),
    [
        (
            "heads",
            {"heads": 3, "kv_heads": 1},
            "does not divide num_attention_heads=3.*work: 1, 3;",
        ),
        (
            "uneven",
            {"intermediate_size": 33},
            "the 33 output features of model.layers.0.mlp.gate_proj",
        ),
        ("vocabulary", {"vocab": 1}, "tp=2 does not divide the 1 output features of model.embed"),
        ("tied to a whole head", {"tied": True}, "embed_tokens and lm_head share a weight"),
        ("quantised", {}, "model.layers.1.mlp.down_proj=Bilinear cannot be cut"),
        ("twice", {}, "already tensor parallel; call undo"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_is_done(
    how: str, settings: dict[str, Any], message: str
) -> None:
    for said, untouched in run_ranks(_refused, 2, {"family": "llama", **settings}, how):
        assert re.search(message, said), said
        assert untouched
