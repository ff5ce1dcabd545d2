"""Compile the layers of a model, one by one, after it was cut.

A whole model in stages is no graph: its forward ends in the middle, and messages go between the
ranks. A layer is one. Its forward is compiled and not its call, so that hooks (those that bring in
what a stage received, and the user's) and a recompute stay outside of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from goose_strategy.compat.torch import is_compiled, is_compiled_wrapper
from goose_strategy.errors import ConfigError, PlanError
from goose_strategy.pipeline_parallel.probe import find_stack
from goose_strategy.pipeline_parallel.program import splits_backward

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.config import PipelineConfig

_DEFAULT = "inductor"


def check_backend(compile_layers: bool | str) -> None:  # noqa: FBT001 - a setting
    """Check that torch knows the backend.

    Raises:
        ConfigError: With those that it knows, if not.
    """
    if not compile_layers:
        return
    known = torch.compiler.list_backends(exclude_tags=())
    name = _DEFAULT if compile_layers is True else compile_layers
    if name not in known:
        raise ConfigError(
            f"compile_layers={compile_layers!r} is no backend of torch.compile; choose True or one "
            f"of {', '.join(map(repr, known))}."
        )


def refuse_split(schedule: str, what: str) -> None:
    """Refuse compiled layers under a schedule that puts weight gradients off.

    A compiled backward computes all gradients at once. The layers of such a schedule put their
    inputs aside instead, which a graph would do once, while it is made.

    Raises:
        ConfigError: If the schedule has ``W``.
    """
    if splits_backward(schedule):
        raise ConfigError(
            f"{what} does not work with schedule={schedule!r}, which computes weight gradients as "
            "actions of their own; use '1F1B', 'Interleaved1F1B', 'LoopedBFS' or 'GPipe', or leave "
            "the layers uncompiled."
        )


def check_compiled(model: nn.Module, config: PipelineConfig, *, pp: int, tp: int) -> None:
    """Refuse what is or shall be compiled in a model that cannot be cut then.

    Args:
        model: The whole model, before any surgery.
        config: Settings of the pipeline.
        pp: Number of ranks of the pipeline.
        tp: Number of ranks that split a layer.

    Raises:
        PlanError: If layers shall be compiled and there is no stack of them; if, in a model to be
            cut, ``torch.compile(module)`` stands in the place of a module, or what holds the layers
            is compiled.
        ConfigError: If torch does not know the backend, or if modules are compiled and the schedule
            puts weight gradients off.
    """
    check_backend(config.compile_layers)
    stack = find_stack(model) if config.compile_layers or pp > 1 else ""
    if pp == tp == 1:
        return
    for name, module in model.named_modules():
        if is_compiled_wrapper(module):
            raise PlanError(
                f"{name or type(model).__name__} was replaced by torch.compile(module), which "
                "renames the parameters in it; call module.compile() on it instead, or use "
                "PipelineConfig(compile_layers=True)."
            )
        # The model's own call is never a graph with pp > 1: the schedule is behind it.
        if pp == 1 or not name or not is_compiled(module):
            continue
        if stack.startswith(f"{name}."):
            raise PlanError(
                f"pp={pp}: {name} is compiled, but holds all layers and ends on each stage "
                "somewhere in the middle; compile its layers, by their own .compile() or "
                "PipelineConfig(compile_layers=True).",
                axis="pp",
            )
        if config.schedule != "auto":
            refuse_split(config.schedule, f"{name}.compile()")


def compile_layers(
    model: nn.Module,
    backend: bool | str,  # noqa: FBT001 - a setting
    *,
    absent: Collection[str] = (),
) -> Callable[[], None]:
    """Compile the forwards of a model's layers in place; compiled when they first run.

    Args:
        model: The model, after it was cut.
        backend: ``True`` for torch's own, or a name.
        absent: Names of the layers that other ranks hold.

    Returns:
        What puts their own forwards back.
    """
    stack = find_stack(model)
    children = model.get_submodule(stack).named_children()
    layers = [layer for name, layer in children if f"{stack}.{name}" not in absent]
    return _compile([layer for layer in layers if not is_compiled(layer)], backend)


def _compile(layers: Sequence[nn.Module], backend: bool | str) -> Callable[[], None]:  # noqa: FBT001
    before = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        name = _DEFAULT if backend is True else str(backend)
        vars(layer)["forward"] = torch.compile(layer.forward, backend=name)

    def restore() -> None:
        for layer, forward in zip(layers, before, strict=True):
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = forward

    return restore
