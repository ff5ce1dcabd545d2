"""Cutting a model in place over the tensor-parallel ranks, and putting it together again.

torch's ``parallelize_module`` and transformers' ``apply_tensor_parallelism`` leave DTensors behind,
whose dispatch costs more than the layers (see `linear`). Here the model keeps its class, its module
and parameter names and its `torch.nn.Parameter` objects; what changed is told in `ShardSpec` s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from goose_strategy.comm.collectives import all_gather_uneven
from goose_strategy.compat.peft import is_lora, layers_under
from goose_strategy.errors import PlanError
from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.tensor_parallel.counts import (
    argument_places,
    divide_counts,
    local_heads,
    set_count,
)
from goose_strategy.tensor_parallel.dropout import hook_regions
from goose_strategy.tensor_parallel.experts import check_experts, cut_experts
from goose_strategy.tensor_parallel.head import HeadSwitch
from goose_strategy.tensor_parallel.layers import (
    CUT,
    HowCut,
    check_layer,
    convert_layer,
    cut_dims,
)
from goose_strategy.tensor_parallel.lora import (
    check_adapters,
    cut_adapters,
    enters_alone,
    head_layers,
)
from goose_strategy.tensor_parallel.plan import Style, TensorPlan, generic_name, parent_name
from goose_strategy.tensor_parallel.regions import enter_island
from goose_strategy.tensor_parallel.slicing import Cut, Slicer, replace_data

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.tensor_parallel.convert import Converted

_RECORD = "_goose_tensor_parallel"


@dataclass
class _Record:
    """What was done to a model, kept on it so that `undo` needs nothing else."""

    group: ProcessGroup
    slicer: Slicer
    converted: list[Converted] = field(default_factory=list)
    handles: list[RemovableHandle] = field(default_factory=list)
    shares: set[Tensor] = field(default_factory=set)
    counts: list[Callable[[], None]] = field(default_factory=list)
    switch: HeadSwitch | None = None


def parallelize(
    model: nn.Module,
    plan: TensorPlan,
    mesh: ParallelMesh,
    *,
    owned: Collection[str] | None = None,
) -> dict[str, ShardSpec]:
    """Cut ``model`` in place; with tp of size 1 nothing is changed.

    A pipeline stage may be given: modules without parameters stand for those of other stages and
    are passed over. Nothing is changed if the model cannot be cut.

    Args:
        model: The model that the plan's names belong to; equal on all tp ranks. Parameters may be
            on the meta device.
        plan: How to cut it.
        mesh: Gives the tp group and this rank's place in it.
        owned: Names of the modules (with all below) that may be cut; all if ``None``.

    Returns:
        Spec of every parameter that ``model.named_parameters()`` lists, by that name.

    Raises:
        PlanError: If tp does not fit the model's sizes, a module is not of the class that its
            style cuts, or the model is cut already.
    """
    if _RECORD in vars(model):
        raise PlanError(
            f"model={type(model).__name__} is already tensor parallel; call undo(model) first.",
            axis="tp",
        )
    if mesh.tp is None:
        return {name: ShardSpec.replicated(name, param) for name, param in model.named_parameters()}
    work = check_cut(model, plan, mesh.tp_size, owned=owned)
    plan = plan.fitted(mesh.tp_size)
    record = _Record(mesh.tp, Slicer(parts=mesh.tp_size, index=mesh.tp_rank))
    _convert(model, plan, work, record)
    record.handles += hook_regions(model, work, mesh)
    _localise(model, plan, work, record)
    _hook_islands(model, plan, work, record)
    vars(model)[_RECORD] = record
    return {name: _spec(name, param, plan, record) for name, param in model.named_parameters()}


def undo(model: nn.Module) -> None:
    """Gather every cut parameter and give the modules their classes back; collective over tp.

    The parameters stay the same objects, with whole values and no gradients. A model that is not
    tensor parallel is left as it is.
    """
    record: _Record | None = vars(model).pop(_RECORD, None)
    if record is None:
        return
    for handle in record.handles:
        handle.remove()
    for param, cut in record.slicer.items():
        slices = all_gather_uneven(param.data, record.group, dim=cut.dim, sizes=cut.sizes)
        replace_data(param, cut.join(slices).contiguous())
    for module in record.converted:
        module.restore()
    for put_back in reversed(record.counts):
        put_back()


def head_switch(model: nn.Module) -> HeadSwitch | None:
    """Return what chooses between local and whole logits; ``None`` if no head was cut here."""
    record: _Record | None = vars(model).get(_RECORD)
    return None if record is None else record.switch


def modules_to_cut(model: nn.Module, plan: TensorPlan) -> dict[str, tuple[nn.Module, Style]]:
    """List every module that ``plan`` cuts, by name, with its style.

    Modules without parameters, which stand for those of other stages, are left out.

    Raises:
        PlanError: If a module is not of the class that its style cuts.
    """
    found: dict[str, tuple[nn.Module, Style]] = {}
    for name, module in model.named_modules():
        style = plan.style_of(name)
        if _is_placeholder(module):
            continue
        is_cut = style in CUT
        check_adapters(name, module, is_cut=is_cut)
        if style is None or not is_cut:
            continue
        if style is Style.EXPERTS:
            check_experts(name, module)
        else:
            for inside, layer in layers_under(module).items():
                check_layer(f"{name}.{inside}" if inside else name, layer, style)
        found[name] = module, style
    return found


def check_cut(
    model: nn.Module, plan: TensorPlan, tp: int, *, owned: Collection[str] | None = None
) -> dict[str, tuple[nn.Module, Style]]:
    """Check that `parallelize` can cut ``model``; for callers that change it before.

    Args:
        model: The model; left as it is.
        plan: How it will be cut.
        tp: Into how many parts.
        owned: As for `parallelize`.

    Returns:
        Every module that will be cut, by name, with its style.

    Raises:
        PlanError: If it cannot be cut.
    """
    found = modules_to_cut(model, plan.fitted(tp)).items()
    work = {name: entry for name, entry in found if _is_owned(name, owned)}
    for name, (module, style) in work.items():
        if style is Style.EXPERTS:
            check_experts(name, module, tp)
        elif style is not Style.KEY_VALUE:
            _check_size(name, module, style, plan, tp)
    for name, param in _numbers_per_head(model, plan):
        if param.shape[0] % tp:
            raise PlanError(
                f"tp={tp} does not divide the {param.shape[0]} entries of {name}; choose a "
                f"divisor of {param.shape[0]}.",
                axis="tp",
            )
    _check_shared(model, plan, work)
    return work


def _check_size(name: str, module: nn.Module, style: Style, plan: TensorPlan, tp: int) -> None:
    """Check that a layer, and each of the matrices that it is made of, can be cut."""
    layer = next(iter(layers_under(module).values()))
    dim = cut_dims(layer, style)["weight"]
    size = layer.get_parameter("weight").shape[dim]
    is_row = style in (Style.ROW, Style.SPLIT)
    if size < tp or (size % tp and (is_row or style in (Style.COLUMN, Style.GATHERED))):
        side = "input" if is_row else "output"
        raise PlanError(
            f"tp={tp} does not divide the {size} {side} features of {name} of this {plan.family} "
            f"model; choose a divisor of {size}.",
            axis="tp",
        )
    Cut(dim, size, tp, 0, plan.packed_of(name))


def _check_shared(
    model: nn.Module, plan: TensorPlan, work: Mapping[str, tuple[nn.Module, Style]]
) -> None:
    """Check that modules which share a parameter cut it alike."""
    seen: dict[Tensor, tuple[str, int | None]] = {}
    styles = {
        layer: style for module, style in work.values() for layer in layers_under(module).values()
    }
    for name, module in model.named_modules():
        style = styles.get(module)
        for kind, param in module.named_parameters(recurse=False):
            dim = None if style is None else cut_dims(module, style).get(kind)
            if plan.style_of(f"{name}.{kind}" if name else kind) is Style.COLUMN:
                dim = 0
            other, other_dim = seen.setdefault(param, (name, dim))
            if other_dim != dim:
                raise PlanError(
                    f"{other} and {name} share a weight, but one cuts dim={other_dim} of it and "
                    f"the other dim={dim}; untie them, or give both a style that cuts alike.",
                    axis="tp",
                )


def _is_owned(name: str, owned: Collection[str] | None) -> bool:
    if owned is None:
        return True
    while name not in owned:
        if not name:
            return False
        name = parent_name(name)
    return True


def _is_placeholder(module: nn.Module) -> bool:
    """Return whether the module stands for one that lives on another stage."""
    return not any(param.numel() for param in module.parameters())


def _convert(
    model: nn.Module,
    plan: TensorPlan,
    work: Mapping[str, tuple[nn.Module, Style]],
    record: _Record,
) -> None:
    """Cut every module of ``work``."""
    for name, (module, style) in work.items():
        if style is Style.EXPERTS:
            record.handles += cut_experts(module, record.slicer, record.group)
            continue
        alone, packed = _island_of(name, plan) is None, plan.packed_of(name)
        if alone and (handle := enters_alone(module, style, record.group)) is not None:
            record.handles.append(handle)
            alone = False
        how = HowCut(style, copies_input=alone, packed=packed, kv_heads=plan.kv_heads)
        for layer in layers_under(module).values():
            record.converted.append(convert_layer(layer, how, record.slicer, record.group))
        if is_lora(module):
            adapted = cut_adapters(module, how, record.slicer, record.group)
            record.converted += adapted.converted
            record.handles += adapted.handles
            record.shares.update(adapted.shares)
        if style is Style.HEAD:
            record.switch = HeadSwitch(*head_layers(module), gather_logits=plan.gather_logits)
            record.handles += record.switch.attach(model)
    for _, param in _numbers_per_head(model, plan):
        record.slicer.cut(param, 0)


def _numbers_per_head(model: nn.Module, plan: TensorPlan) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that a rule names themselves as cut, such as attention sinks."""
    return [
        (name, param)
        for name, param in model.named_parameters()
        if plan.style_of(name) is Style.COLUMN and param.numel()
    ]


def _localise(
    model: nn.Module,
    plan: TensorPlan,
    work: Mapping[str, tuple[nn.Module, Style]],
    record: _Record,
) -> None:
    """Tell the attention modules how many heads this rank has, and give them their arguments."""
    attention = plan.attention
    tp, index = record.slicer.parts, record.slicer.index
    for name, module in model.named_modules() if plan.counts else ():
        numbers = plan.counts.get(generic_name(name), ())
        if numbers and not _is_placeholder(module):
            record.counts += divide_counts(name, module, numbers, tp)
    if attention is None:
        return
    parents = {parent_name(name) for name in work}
    for name in sorted(parents):
        if generic_name(name) != attention.module:
            continue
        module = model.get_submodule(name)
        record.counts += divide_counts(name, module, attention.numbers, tp)
        if any(style is Style.KEY_VALUE for style in plan.rules.values()):
            own = plan.divisible[attention.heads] // tp
            record.counts.append(set_count(module, attention.groups, own))
        if attention.sliced:
            places = argument_places(module, attention.sliced)
            hook = _slicing(places, heads=plan.divisible[attention.heads], tp=tp, index=index)
            record.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))


def _slicing(places: Mapping[str, int], *, heads: int, tp: int, index: int) -> Any:
    """Make the hook that leaves an attention module the arguments of this rank's heads."""

    def keep_own(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        local = partial(local_heads, rows=hidden.shape[0], heads=heads, tp=tp, index=index)
        by_place = {place: name for name, place in places.items()}
        own = tuple(local(arg) if at in by_place else arg for at, arg in enumerate(args))
        named = {key: local(arg) if key in places else arg for key, arg in kwargs.items()}
        return own, named

    return keep_own


def _island_of(name: str, plan: TensorPlan) -> str | None:
    """Return the innermost island around the module ``name``."""
    while name:
        name = parent_name(name)
        if plan.island_argument(name) is not None:
            return name
    return None


def _hook_islands(
    model: nn.Module,
    plan: TensorPlan,
    work: Mapping[str, tuple[nn.Module, Style]],
    record: _Record,
) -> None:
    """Copy the input once at the entry of every island that holds a column layer."""
    columns = [name for name, (_, style) in work.items() if style is Style.COLUMN]
    islands = {island for name in columns if (island := _island_of(name, plan)) is not None}
    for name in sorted(islands):
        argument = plan.island_argument(name) or ""
        handle = model.get_submodule(name).register_forward_pre_hook(
            _entry(argument, record.group), with_kwargs=True
        )
        record.handles.append(handle)


def _entry(
    argument: str, group: ProcessGroup
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Make the hook that copies the first (or the named) argument into the island."""

    def enter(
        _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (enter_island(args[0], group), *args[1:]), kwargs
        kwargs[argument] = enter_island(kwargs[argument], group)
        return args, kwargs

    return enter


def _spec(name: str, param: Tensor, plan: TensorPlan, record: _Record) -> ShardSpec:
    """Describe one parameter of a cut model."""
    cut = record.slicer.get(param)
    if cut is not None:
        return cut.spec(name, param)
    is_share = plan.whole_style(name) is Style.PARTIAL or param in record.shares
    partial = is_share and param.numel() > 0
    return ShardSpec.replicated(name, param, tp_partial=partial)
