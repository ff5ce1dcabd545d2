"""Random numbers between a column and a row layer: each tp rank draws its own.

Outside of the cut layers all tp ranks hold the same activations and must drop the same elements, so
their generators stay equal (the *shared* stream). Between a column layer and its row layer each
rank holds other heads or features; drawing from the shared stream there would give head 0 of one
rank the mask of head 0 of another. Megatron-LM has a tracker of named generators for this, which
its layers ask by name; transformers' modules call ``dropout`` wherever they like, so here the
default generators themselves change streams where a column layer ends, and change back where the
row layer has summed.

The *local* stream of a region follows from the state of the shared one and the rank. That state is
what activation checkpointing restores before it computes a layer again, so the masks are the same
then. A recomputation that drew fresh masks was reported for OLMo-core (issue 828), dropout on the
wrong stream beside cut layers for Megatron-LM (issue 1256).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from goose_strategy.compat.peft import is_lora
from goose_strategy.mesh.generators import Generators, State, changed, fingerprint
from goose_strategy.tensor_parallel.plan import Style, parent_name

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh

_BEGINS = (Style.COLUMN, Style.KEY_VALUE)
# What modules and configs call the probabilities of their random choices; nn.Dropout says "p".
_NAMES = re.compile(r"drop|noise|jitter|prob|^p$")
# Probabilities that transformers' configs carry for the heads of other tasks.
_OTHER_TASKS = re.compile(r"classifier|summary")


class LocalStream:
    """Moves the generators of one rank to its own stream and back, for one region.

    Args:
        generators: What is moved.
        tp_rank: Tells the ranks' streams apart.
    """

    def __init__(self, generators: Generators, tp_rank: int) -> None:
        self._generators = generators
        self._tp_rank = tp_rank
        self._shared: State | None = None
        self._start: State = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self) -> None:
        """Put the shared stream aside; inside already, nothing changes."""
        if self._shared is None:
            shared = self._generators.capture()
            self._start = self._generators.seed(fingerprint(shared, self._tp_rank))
            self._shared = shared

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self) -> None:
        """Take the shared stream up again.

        It moves on by one number if the region drew any, so that the next region's stream is
        another. If it drew none, the shared stream is that of one process, to the bit.
        """
        if self._shared is None:
            return
        shared, self._shared = self._shared, None
        drew = changed(self._start, self._generators.capture())
        self._generators.restore(shared)
        self._generators.advance(drew)

    def before_adapters(self, _layer: nn.Module, _args: Any) -> None:
        """Forward pre-hook of a layer with adapters, which may come after another column layer."""
        self.leave()

    def after_column(self, layer: nn.Module, _args: Any, _output: Any) -> None:
        """Forward hook of a column layer."""
        if layer.training:
            self.enter()

    def before_row(self, _layer: nn.Module, _args: Any) -> None:
        """Forward pre-hook of a row layer, which draws nothing itself.

        A layer that is computed again for its backward is left as soon as the last tensor to be
        saved is there, which may be this one's input: nothing behind it would run.
        """
        self.leave()

    def at_end(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        """Forward hook of a row layer, and of the region's parent, in case an error ended it."""
        self.leave()


def hook_regions(
    model: nn.Module, work: Mapping[str, tuple[nn.Module, Style]], mesh: ParallelMesh
) -> list[RemovableHandle]:
    """Give every region that may draw random numbers a stream of its own on each tp rank.

    A region lies between the column layers of one parent module and its row layers, which may lie
    deeper in it. Parents without any probability above zero get no hooks and cost nothing.

    Args:
        model: The model.
        work: Its cut modules by name, with their styles.
        mesh: Gives the device and this rank's place.

    Returns:
        Handles of the hooks.
    """
    handles: list[RemovableHandle] = []
    generators = Generators(mesh.device)
    parents = {parent_name(name) for name, (_, style) in work.items() if style in _BEGINS}
    for parent in sorted(parents):
        module = model.get_submodule(parent)
        if not may_draw(module):
            continue
        stream = LocalStream(generators, mesh.tp_rank)
        for name, (layer, style) in work.items():
            if _region_of(name, style, parents) != parent:
                continue
            if is_lora(layer):
                # Its own dropout is of its input, which all ranks hold alike or slice alike.
                handles.append(layer.register_forward_pre_hook(stream.before_adapters))
            if style in _BEGINS:
                handles.append(layer.register_forward_hook(stream.after_column))
            elif style is Style.ROW:
                if not is_lora(layer):
                    handles.append(layer.register_forward_pre_hook(stream.before_row))
                handles.append(layer.register_forward_hook(stream.at_end))
        handles.append(module.register_forward_hook(stream.at_end, always_call=True))
    return handles


def _region_of(name: str, style: Style, parents: Collection[str]) -> str:
    """Return the parent to whose region a cut layer belongs.

    A row layer in a module of its own (an output with its dropout behind it) ends the region of the
    nearest module around it that has one; else what follows it would be drawn by each rank anew.
    """
    parent = own = parent_name(name)
    while style is Style.ROW and parent and parent not in parents:
        parent = parent_name(parent)
    return parent if parent in parents else own


def may_draw(module: nn.Module) -> bool:
    """Return whether a number that a module or its config holds looks like a probability to drop.

    It goes by names, since ``dropout`` is called as a function as often as it is a module. One that
    is found too many costs microseconds.
    """
    for part in module.modules():
        config = getattr(part, "config", None)
        held = [*vars(part).items(), *(vars(config).items() if hasattr(config, "__dict__") else ())]
        if any(_is_probability(name, value) for name, value in held):
            return True
    return False


def _is_probability(name: str, value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return value > 0 and bool(_NAMES.search(name)) and not _OTHER_TASKS.search(name)
