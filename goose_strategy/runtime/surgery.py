"""What is done to a module once: choose its models, cut them, describe what is left.

The order is fixed by what each cut needs to see: plans and the probe read the whole model; the
pipeline frees what other stages own; tensor parallelism then cuts what remains. Every refusal
depends on the model and the settings alone, so all ranks refuse alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from goose_strategy.compat.transformers import (
    computes_own_loss,
    install_loss,
    is_causal_lm,
    output_embedding,
    pretrained_models,
    tied_parameters,
)
from goose_strategy.errors import PlanError
from goose_strategy.grads.store import WeightGradStore
from goose_strategy.hub.twin import runnable_twin
from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.models.choose import choose_plan
from goose_strategy.pipeline_parallel.compiled import check_compiled, compile_layers
from goose_strategy.pipeline_parallel.probe import probe_model
from goose_strategy.pipeline_parallel.program import splits_backward
from goose_strategy.pipeline_parallel.recompute import choose_modules, recompute_modules
from goose_strategy.pipeline_parallel.stage import ModelPart, cut_model
from goose_strategy.pipeline_parallel.whole import whole_part
from goose_strategy.privacy.classes import tell_samples_apart
from goose_strategy.runtime.counting import SampleSwitch
from goose_strategy.runtime.planning import Subject, plan_pipeline
from goose_strategy.runtime.private import check_private
from goose_strategy.tensor_parallel.defer import defer_weight_gradients
from goose_strategy.tensor_parallel.head import HeadSwitch, causal_lm_loss
from goose_strategy.tensor_parallel.parallelize import (
    head_switch,
    parallelize,
    undo,
)

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.runtime.planning import PipelinePlan
    from goose_strategy.runtime.settings import RuntimeConfig
    from goose_strategy.tensor_parallel.plan import TensorPlan

Count = Callable[[], Tensor | None]
PLACEHOLDER = "goose_placeholder"


@dataclass
class Surgery:
    """What was done to a module, and how to undo the reversible part of it.

    Attributes:
        models: Names and causal LMs whose forward is ours.
        specs: Layout of every parameter, by its name in the user's module.
        plan: How the model is cut in depth, or ``None`` at ``pp=1``.
        part: This rank's stages, or ``None`` at ``pp=1``.
        tied: Names of tied copies on this rank -> name of the weight on the first rank.
        aliases: Name of a tied weight -> the further names that a plain state dict has for it.
        whole: The model as the only stage, where calls run a schedule at ``pp=1``.
        positions: Whether the model looks up something for positions, too.
        by_sample: Whether the models' losses are sums over samples now.
        trains: Whether any parameter of the whole module is trainable.
        emptied: Modules whose own parameters live on other stages.
        reversals: What puts the model back, last one first.
    """

    models: list[tuple[str, nn.Module]]
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    plan: PipelinePlan | None = None
    part: ModelPart | None = None
    tied: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)
    whole: ModelPart | None = None
    positions: bool = False
    by_sample: SampleSwitch = field(default_factory=SampleSwitch)
    trains: bool = False
    emptied: list[nn.Module] = field(default_factory=list)
    reversals: list[Callable[[], None]] = field(default_factory=list)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Type of the loss: fp64 for fp64 models, else fp32."""
        wide = any(spec.dtype == torch.float64 for spec in self.specs.values())
        return torch.float64 if wide else torch.float32

    @property
    def stage_of(self) -> dict[str, int]:
        """The stage of each parameter that only one of the rank's stages uses."""
        if self.part is None:
            return {}
        prefix = self.models[0][0]
        return {_join(prefix, name): stage for name, stage in self.part.stage_of.items()}

    @property
    def head(self) -> HeadSwitch | None:
        """What chooses between local and whole logits on this rank, if tp cut a head here."""
        switches = (head_switch(model) for _, model in self.models)
        return next((switch for switch in switches if switch is not None), None)

    @contextmanager
    def placeholders(self) -> Generator[None, None, None]:
        """Give emptied modules a 0-element parameter inside the block.

        An optimizer over the head alone, built after surgery, would get an empty list on the
        other stages and raise there, while the stages that hold the head go on and hang.
        """
        for module in self.emptied:
            module.register_parameter(PLACEHOLDER, nn.Parameter(torch.empty(0)))
        try:
            yield
        finally:
            for module in self.emptied:
                delattr(module, PLACEHOLDER)

    def close(self) -> None:
        """Put the models' own losses back and gather what tensor parallelism cut. Collective."""
        while self.reversals:
            self.reversals.pop()()


def operate(
    module: nn.Module, mesh: ParallelMesh, config: RuntimeConfig, *, count: Count
) -> Surgery:
    """Cut a module in place. Collective only where tensors are shared out; all ranks agree.

    Args:
        module: The user's module, equal on all ranks.
        mesh: The mesh.
        config: Settings of the runtime.
        count: Gives the token count of the running call to the loss function.

    Returns:
        What was done.

    Raises:
        PlanError: If the module cannot be cut as asked.
    """
    models = _choose(module, mesh, private=config.privacy is not None)
    if config.privacy is not None:
        check_private(module, models, config)
    again = _choose_recomputed(models or [("", module)], config)
    for _, lm in models or [("", module)]:
        check_compiled(lm, config.pipeline, pp=mesh.pp_size, tp=mesh.tp_size)
    surgery = Surgery(models, trains=any(p.requires_grad for p in module.parameters()))
    surgery.positions = any(_looks_up_positions(lm) for _, lm in models)
    for second, first in tied_parameters(module).items():
        surgery.aliases.setdefault(first, []).append(second)
    plans = _plan_layers(models, mesh, config)
    if mesh.pp_size > 1:
        _cut_depth(surgery, module, mesh, config)
    inside: dict[str, ShardSpec] = {}
    for (prefix, lm), plan in zip(models, plans, strict=True):
        if plan is not None:
            cut = parallelize(lm, plan, mesh)
            surgery.reversals.append(partial(undo, lm))
            inside |= {_join(prefix, name): spec for name, spec in cut.items()}
        if computes_own_loss(lm):
            continue
        gather = config.tensor.gather_logits or config.pipeline.return_logits
        head = output_embedding(lm)
        loss = causal_lm_loss(
            head[1] if head else None,
            gather_logits=gather,
            count=count,
            per_sample=None if config.privacy is None else surgery.by_sample,
        )
        surgery.reversals.append(install_loss(lm, loss))
    _change_layers(surgery, models or [("", module)], again, config)
    surgery.specs = _all_specs(module, inside, surgery, mesh)
    return surgery


def _plan_layers(
    models: list[tuple[str, nn.Module]], mesh: ParallelMesh, config: RuntimeConfig
) -> list[TensorPlan | None]:
    """Return how the layers of each model are cut; checked before anything is changed.

    The pipeline frees other stages' weights, so a later refusal would come too late.
    """
    return [
        choose_plan(lm, mesh, config.tensor) if mesh.tp is not None else None for _, lm in models
    ]


def _change_layers(
    surgery: Surgery,
    models: list[tuple[str, nn.Module]],
    again: list[tuple[nn.Module, list[str]]],
    config: RuntimeConfig,
) -> None:
    """Let layers put weight gradients off, be compiled, and be computed again, in this order."""
    part, plan = surgery.part, surgery.plan
    if config.privacy is not None:
        _tell_samples_apart(surgery)
    elif part is not None and plan is not None and splits_backward(plan.config.schedule):
        store = WeightGradStore()
        surgery.reversals.append(defer_weight_gradients(part.module, store))
        surgery.part = replace(part, store=store)
    absent = part.absent if part is not None else []
    backend = config.pipeline.compile_layers
    for _, root in models if backend else []:
        surgery.reversals.append(compile_layers(root, backend, absent=absent))
    for root, names in again:
        surgery.reversals.append(recompute_modules(root, names, absent=absent))


def _tell_samples_apart(surgery: Surgery) -> None:
    """Let every trainable parameter push what its gradients per sample are made of."""
    store = WeightGradStore(per_sample=True)
    part = surgery.part or whole_part(surgery.models[0][1])
    surgery.reversals.append(defer_weight_gradients(part.module, store))
    surgery.reversals.append(tell_samples_apart(part.module, store))
    if surgery.part is not None:
        surgery.part = replace(part, store=store)
    else:
        surgery.whole = replace(part, store=store)


def _looks_up_positions(lm: nn.Module) -> bool:
    """Tell whether a model takes ``position_ids`` and has a second table to look something up."""
    tables = [m for m in lm.modules() if isinstance(m, nn.Embedding)]
    return len(tables) > 1 and "position_ids" in inspect.signature(lm.forward).parameters


def _choose(module: nn.Module, mesh: ParallelMesh, *, private: bool) -> list[tuple[str, nn.Module]]:
    """Return the causal LMs that are cut: the trainable ones, or all where none is trainable.

    Where there is none, tensor parallelism takes models that compute their loss themselves, too.

    Raises:
        PlanError: If tp or pp is asked for and there is no such model, or pp and there are two.
    """
    inside = pretrained_models(module)
    found = [(name, lm) for name, lm in inside if is_causal_lm(lm)]
    if not (found or private) and mesh.tp is not None and mesh.pp_size == 1:
        found = [(name, lm) for name, lm in inside if computes_own_loss(lm)]
    trainable = [(n, lm) for n, lm in found if any(p.requires_grad for p in lm.parameters())]
    chosen = trainable or found
    if mesh.tp is None and mesh.pp_size == 1:
        return chosen
    if not chosen:
        held = sorted({type(lm).__name__ for _, lm in inside})
        raise PlanError(
            f"tp={mesh.tp_size}, pp={mesh.pp_size} need a transformers causal LM inside "
            f"{type(module).__name__}, but it holds {held or 'no transformers model'}; use "
            "tp=1, pp=1, which trains any module in ddp's place."
        )
    if mesh.pp_size > 1 and len(chosen) > 1:
        names = ", ".join(f"{name or 'the module'} ({type(lm).__name__})" for name, lm in chosen)
        raise PlanError(
            f"pp={mesh.pp_size} cuts one model, but {len(chosen)} are trainable: {names}; freeze "
            "all but one, or use pp=1."
        )
    return chosen


def _choose_recomputed(
    models: list[tuple[str, nn.Module]], config: RuntimeConfig
) -> list[tuple[nn.Module, list[str]]]:
    """Return the models whose modules are computed again in the backward, with their names."""
    recompute = config.pipeline.recompute
    if recompute in ("none", "full"):
        return []
    return [(lm, choose_modules(lm, recompute, staged=config.pp > 1)) for _, lm in models]


def _cut_depth(
    surgery: Surgery, module: nn.Module, mesh: ParallelMesh, config: RuntimeConfig
) -> None:
    prefix, lm = surgery.models[0]
    inside = {id(p) for p in lm.parameters()}
    outside = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in inside]
    if outside:
        raise PlanError(
            f"pp={mesh.pp_size}: {len(outside)} trainable parameters (first: {outside[0]}) lie "
            f"outside of {type(lm).__name__}, which alone is cut into stages; freeze them or use "
            "pp=1."
        )
    _refuse_layerdrop(lm, mesh.pp_size)
    if getattr(getattr(lm, "config", None), "output_router_logits", False):
        raise PlanError(
            f"output_router_logits=True adds a loss over the routers of all layers, but pp="
            f"{mesh.pp_size} leaves each stage those of its own; set it to False in the model's "
            "config, or use pp=1.",
            axis="pp",
        )
    owners = [m for m in lm.modules() if any(True for _ in m.parameters(recurse=False))]
    unread = any(param.is_meta for param in lm.parameters())
    probed = runnable_twin(lm, mesh.device) if unread else lm
    info = probe_model(probed)
    plan = plan_pipeline(Subject(lm, probed, info), config, mesh)
    surgery.plan = plan
    surgery.part = cut_model(lm, info, plan.bounds, mesh.pp_rank, plan.chunks)
    surgery.emptied = [m for m in owners if not any(True for _ in m.parameters(recurse=False))]
    surgery.tied = {
        _join(prefix, local): _join(prefix, canonical)
        for local, canonical in surgery.part.tied.items()
    }


def _refuse_layerdrop(lm: nn.Module, pp: int) -> None:
    """Refuse layers that are skipped at random: a stage begins and ends with calls of its layers.

    Raises:
        PlanError: If a module's ``layerdrop`` is above zero.
    """
    for name, module in lm.named_modules():
        rate = getattr(module, "layerdrop", 0)
        if isinstance(rate, (int, float)) and rate > 0:
            raise PlanError(
                f"pp={pp} cannot cut {type(lm).__name__}, which skips layers at random: "
                f"{name}.layerdrop={rate}. Set it to 0 before the set-up, or use pp=1.",
                axis="pp",
            )


def _all_specs(
    module: nn.Module, inside: dict[str, ShardSpec], surgery: Surgery, mesh: ParallelMesh
) -> dict[str, ShardSpec]:
    """Return the spec of every parameter of the module, with its name there and its tie."""
    specs: dict[str, ShardSpec] = {}
    for name, param in module.named_parameters():
        spec = replace(inside.get(name) or ShardSpec.replicated(name, param), name=name)
        canonical = surgery.tied.get(name)
        if canonical is not None:
            spec = replace(spec, tie=canonical, tie_owner=mesh.is_first_stage)
        specs[name] = spec
    return specs


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
