"""Compute modules again inside of the backward: the layers, or whatever modules are named.

transformers' ``gradient_checkpointing_enable`` covers the layers of its own models, and only if
their authors thought of it. Here any module of any model is wrapped, with any number of stages, and
buffers are not changed twice (:mod:`~goose_strategy.pipeline_parallel.replay`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from goose_strategy.compat.torch import has_forward_hooks
from goose_strategy.errors import BatchError, PlanError
from goose_strategy.pipeline_parallel.probe import find_stack
from goose_strategy.pipeline_parallel.replay import Buffers, Changes

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def choose_modules(
    model: nn.Module, recompute: str | Sequence[str], *, staged: bool = False
) -> list[str]:
    """Return the names of the modules to compute again.

    Args:
        model: The whole model, before any surgery.
        recompute: ``"layer"``, or names in ``model`` in which ``*`` may stand for layer numbers.
        staged: Whether the model will be cut into stages.

    Returns:
        Their names in ``model``.

    Raises:
        PlanError: If the model has no stack of layers, checkpoints its layers itself, or a name
            fits no module, one that is never called, one inside of another, or (for stages) one
            that holds the layers.
    """
    modules = dict(model.named_modules())
    if not isinstance(recompute, str):
        names = _named(modules, recompute)
        stack = f"{find_stack(model)}." if staged else ""
        holder = next((name for name in names if stack.startswith(f"{name}.")), None)
        if holder is not None:
            raise PlanError(
                f"recompute={list(recompute)!r}: {holder} holds all layers, and ends on each stage "
                "somewhere in the middle; name modules in the layers, or use recompute='full'.",
                axis="pp",
            )
    else:
        stack = find_stack(model)
        names = [f"{stack}.{name}" for name, _ in modules[stack].named_children()]
    own = [n for n, module in modules.items() if getattr(module, "gradient_checkpointing", False)]
    if own:
        raise PlanError(
            f"recompute={recompute!r}, but the model's own gradient checkpointing is on, too (in "
            f"{own[0] or type(model).__name__}), and everything would be computed a third time; "
            "call model.gradient_checkpointing_disable(), or leave recompute='none'."
        )
    return names


def _named(modules: Mapping[str, nn.Module], patterns: Sequence[str]) -> list[str]:
    chosen: list[str] = []
    for pattern in patterns:
        found = [name for name in modules if name and pattern in (name, _NUMBER.sub("*", name))]
        if not found:
            generic = dict.fromkeys(_NUMBER.sub("*", name) for name in modules if "." in name)
            raise PlanError(
                f"recompute={list(patterns)!r}: {pattern!r} is the name of no module; there are "
                f"{', '.join(generic)}."
            )
        chosen += [name for name in found if name not in chosen]
    for name in chosen:
        if type(modules[name]).forward is nn.Module.forward:
            raise PlanError(
                f"recompute={list(patterns)!r}: {name} is a {type(modules[name]).__name__}, which "
                "is never called itself; name the modules in it."
            )
        outer = next((other for other in chosen if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise PlanError(
                f"recompute={list(patterns)!r}: {name} is a part of {outer}, and would be computed "
                "a third time; name one of both."
            )
    return chosen


def recompute_modules(
    model: nn.Module, names: Collection[str], *, absent: Collection[str] = ()
) -> Callable[[], None]:
    """Let modules be computed again inside of the backward.

    Args:
        model: The model, cut or not.
        names: Names of the modules in it.
        absent: Names of the layers that other stages hold; what is in them is left alone.

    Returns:
        What puts their own forwards back.
    """
    modules = dict(model.named_modules())
    elsewhere = tuple(f"{name}." for name in absent)
    here = [name for name in names if not f"{name}.".startswith(elsewhere)]
    wrapped = [Recomputed(modules[name]) for name in here]

    def restore() -> None:
        for one in wrapped:
            one.remove()

    return restore


class Recomputed:
    """The forward of a module that keeps its inputs only, while gradients are wanted.

    Args:
        module: The module; its ``forward`` is replaced on the instance. Hooks of its own stay
            outside and run once.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = vars(module).get("forward")
        self._forward: Callable[..., Any] = module.forward
        self._buffers = Buffers(module)
        vars(module)["forward"] = self.forward

    def remove(self) -> None:
        """Put the module's own forward back."""
        own = vars(self._module)
        own.pop("forward", None)
        if self._before is not None:
            own["forward"] = self._before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what the module's forward does.

        Raises:
            BatchError: If it is given a cache of keys and values, into which it would write twice.
        """
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if any(hasattr(value, "get_seq_length") for value in (*args, *kwargs.values())):
            raise BatchError(
                "A layer that is computed again in the backward (PipelineConfig(recompute=...)) "
                "would write into a cache of keys and values twice; pass use_cache=False, or call "
                "the model under torch.no_grad()."
            )
        return checkpoint(
            # All by position: checkpoint finds the device whose random state it keeps by them.
            partial(self._call, len(args), tuple(kwargs)),
            *args,
            *kwargs.values(),
            use_reentrant=False,
            context_fn=self._contexts if self._buffers else noop_context_fn,
            # A hook behind the module may end what its forward began, such as a stream of random
            # numbers, so that one must come to its end the second time, too.
            early_stop=not has_forward_hooks(self._module),
        )

    def _call(self, positional: int, names: tuple[str, ...], *values: Any) -> Any:
        kwargs = dict(zip(names, values[positional:], strict=True))
        return self._forward(*values[:positional], **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first = _First(self._buffers)
        return first, _Again(self._buffers, first)


class _First:
    """Surrounds the first run of a module."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._stack = ExitStack()
        self.changes = Changes()

    def __enter__(self) -> None:
        self.changes = self._stack.enter_context(self._buffers.first())

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


class _Again:
    """Surrounds every further run; there are several where one graph has several backwards."""

    def __init__(self, buffers: Buffers, first: _First) -> None:
        self._buffers = buffers
        self._first = first
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._buffers.again(self._first.changes))

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)
