"""Wrong settings, models and optimizers: refused on every rank, before anything is changed."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.optim import LBFGS, SGD, AdamW
from transformers import LlamaModel

from goose_strategy import Goose3DFabricStrategy, Goose3DStrategy, PipelineConfig
from goose_strategy.errors import ConfigError
from tests.harness.models import tiny_config, tiny_model
from tests.harness.worker import Context
from tests.strategies.ranks import Raised, attempt, make_fabric, same_error, world

# -- before any process group -------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (1, 3), (2, 3), (8, 1)])
def test_sizes_that_do_not_multiply_to_the_world_are_refused_first(tp: int, pp: int) -> None:
    strategy = Goose3DFabricStrategy(tp=tp, pp=pp)
    with pytest.raises(ConfigError, match=f"tp={tp}.*pp={pp}.*4"):
        Fabric(accelerator="cpu", devices=4, strategy=strategy)
    assert not dist.is_initialized()


@pytest.mark.parametrize("door", [Goose3DFabricStrategy, Goose3DStrategy])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 0}, "tp=0 must be at least 1"),
        ({"pp": 1.5}, "pp=1.5 must be a whole number"),
        ({"privacy": {}}, "privacy"),
        ({"pp": 3, "pipeline": PipelineConfig(partition=[2, 2])}, "lists 2 stages but pp=3"),
    ],
)
def test_wrong_settings_are_refused_where_they_are_written(
    door: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        door(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "ZB-X"}, "schedule='ZB-X' is not known; choose one of .*1F1B"),
        ({"num_microbatches": 0}, "num_microbatches=0 must be at least 1"),
        ({"partition": [4, 0]}, "leaves stage 1 without a layer"),
        ({"partition": []}, r"partition=\[\] names no stages"),
    ],
)
def test_wrong_pipelines_are_refused_where_they_are_written(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineConfig(**settings)


# -- at set-up ----------------------------------------------------------------------------------


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def refused(ctx: Context, module: nn.Module, *optimizers: Any, **sizes: Any) -> Raised:
    """Set up in vain; the module and its optimizers must be as they were."""
    fabric = make_fabric(ctx, **sizes)
    before = shapes(module)
    held = [[[id(p) for p in g["params"]] for g in o.param_groups] for o in optimizers]
    raised: Raised = attempt(partial(fabric.setup, module, *optimizers))
    assert isinstance(raised, Raised)
    assert shapes(module) == before
    assert "forward" not in vars(module)
    assert held == [[[id(p) for p in g["params"]] for g in o.param_groups] for o in optimizers]
    assert not fabric.strategy.runtime.models
    return raised


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = tiny_model("llama")
        self.critic = tiny_model("qwen2")


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model("llama")
        self.value = nn.Linear(32, 1)


def _tp_does_not_divide_the_heads(ctx: Context) -> Raised:
    model = tiny_model("llama", heads=6, kv_heads=6, layers=2)
    return refused(ctx, model, AdamW(model.parameters()), tp=4)


def _more_stages_than_layers(ctx: Context) -> Raised:
    return refused(ctx, tiny_model("llama", layers=3), pp=4)


def _a_partition_that_does_not_sum(ctx: Context) -> Raised:
    return refused(ctx, tiny_model("llama", layers=4), tp=2, pp=2, partition=[1, 2])


def _recompute_what_is_not_there(ctx: Context) -> Raised:
    return refused(ctx, tiny_model("llama"), tp=2, pp=2, recompute=["model.layers.*.ffn"])


def _recompute_what_holds_the_layers(ctx: Context) -> Raised:
    return refused(ctx, tiny_model("llama"), tp=2, pp=2, recompute=["model"])


def _no_transformers_model(ctx: Context) -> Raised:
    return refused(ctx, nn.Linear(2, 2), tp=2)


def _no_layer_stack(ctx: Context) -> Raised:
    model = tiny_model("llama", layers=1)
    model.model.layers = nn.ModuleList()
    return refused(ctx, model, pp=2)


def _no_causal_lm(ctx: Context) -> Raised:
    return refused(ctx, LlamaModel(tiny_config("llama")), pp=2)


def _an_optimizer_that_cannot_be_sharded(ctx: Context) -> Raised:
    model = tiny_model("llama")
    return refused(ctx, model, LBFGS(model.parameters()), tp=2, pp=2)


def _foreign_parameters(ctx: Context) -> Raised:
    return refused(
        ctx, tiny_model("llama"), AdamW(tiny_model("llama", seed=1).parameters()), tp=2, pp=2
    )


def _an_optimizer_with_state(ctx: Context) -> Raised:
    model = tiny_model("llama")
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return refused(ctx, model, optimizer, tp=2, pp=2)


def _two_trainable_models(ctx: Context) -> Raised:
    return refused(ctx, Two(), pp=2)


def _trainable_parameters_outside_of_the_model(ctx: Context) -> Raised:
    return refused(ctx, Headed(), pp=2)


def _different_models_on_the_ranks(ctx: Context) -> Raised:
    return refused(ctx, tiny_model("llama", layers=4 + (ctx.rank == 3)), tp=2, pp=2)


def _a_parameter_that_is_held_twice_on_one_stage(ctx: Context) -> Raised:
    fabric = make_fabric(ctx, 2, 2)
    model = fabric.setup_module(tiny_model("llama"))
    own = list(model.parameters())
    again = own[:1] if fabric.strategy.runtime.mesh.pp_rank == 1 else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the duplicate in one group, too
        optimizer = AdamW(own)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": again})
    raised: Raised = attempt(partial(fabric.setup_optimizers, optimizer))
    return raised


def _a_module_twice(ctx: Context) -> Raised:
    model = tiny_model("llama")
    make_fabric(ctx, 2, 2).setup(model)
    raised: Raised = attempt(partial(make_fabric(ctx, 2, 2).setup, model))
    return raised


def _a_part_of_a_sharded_module(ctx: Context) -> Raised:
    fabric = make_fabric(ctx, 2, 1)
    whole = nn.ModuleList([tiny_model("llama")])
    fabric.setup_module(whole)
    raised: Raised = attempt(partial(fabric.setup_module, whole[0]))
    return raised


def _an_optimizer_without_its_module(ctx: Context) -> Raised:
    fabric = make_fabric(ctx, 2, 2)
    raised: Raised = attempt(
        partial(fabric.setup_optimizers, AdamW(tiny_model("llama").parameters()))
    )
    return raised


SETUP = {
    _tp_does_not_divide_the_heads: ("PlanError", "tp=4.*num_attention_heads=6.*1, 2"),
    _more_stages_than_layers: ("PlanError", "pp=4 is more than the model's 3 layers"),
    _a_partition_that_does_not_sum: ("PlanError", r"partition=\[1, 2\] sums to 3.*4 layers"),
    _recompute_what_is_not_there: ("PlanError", r"'model\.layers\.\*\.ffn' is the name of no"),
    _recompute_what_holds_the_layers: ("PlanError", "model holds all layers"),
    _no_transformers_model: ("PlanError", "need a transformers causal LM inside Linear"),
    _no_layer_stack: ("PlanError", "layer"),
    _no_causal_lm: ("PlanError", "causal LM inside LlamaModel"),
    _an_optimizer_that_cannot_be_sharded: ("ConfigError", "LBFGS cannot be sharded.*AdamW"),
    _foreign_parameters: ("ConfigError", "parameters that do not belong"),
    _an_optimizer_with_state: ("ConfigError", "has state already"),
    _two_trainable_models: ("PlanError", "2 are trainable: policy.*critic.*freeze"),
    _trainable_parameters_outside_of_the_model: ("PlanError", "value.weight.*outside of Llama"),
    _different_models_on_the_ranks: ("PlanError", "The ranks built different modules"),
    _a_parameter_that_is_held_twice_on_one_stage: ("ConfigError", "held twice"),
    _a_module_twice: ("ConfigError", "pp=2 stages by another strategy"),
    _a_part_of_a_sharded_module: ("ConfigError", "sharded already, as a part"),
    _an_optimizer_without_its_module: ("ConfigError", "parameters of 0 sharded modules"),
}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    return world(4, *SETUP)


@pytest.mark.parametrize("scenario", SETUP, ids=lambda scenario: scenario.__name__.strip("_"))
def test_set_up_is_refused_on_every_rank(runs: dict[str, list[Any]], scenario: Any) -> None:
    same_error(runs[scenario.__name__.strip("_")], *SETUP[scenario])
