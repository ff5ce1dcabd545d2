"""What a probe found out about a model: its stack of layers and what flows between them.

Hugging Face's own pipeline plans name three modules per model class and hand hidden states over as
``inputs_embeds``, which applies position embeddings, norms and scales of the embeddings a second
time: silently wrong for about a fifth of its causal language models. The facts here come from one
forward of the model itself and hold for any class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.nested import Path, show


class Reach(NamedTuple):
    """What a tensor was computed from, without a known tensor in between.

    Attributes:
        tensors: Numbers of other known tensors.
        parameters: Names of parameters.
    """

    tensors: frozenset[int] = frozenset()
    parameters: frozenset[str] = frozenset()


@dataclass(frozen=True)
class TensorFact:
    """One tensor that was passed to or returned by a layer.

    Attributes:
        dtype: As the probe saw it.
        shape: As the probe saw it.
        differentiable: Whether gradients flow through it (all parameters trained).
        carried: Whether a later stage cannot compute it itself.
        known_at: First layer before whose call it existed.
        made_by: Layer that returned it; ``None`` for what was computed between layers.
        reach: What it was computed from.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: bool
    carried: bool
    known_at: int
    made_by: int | None
    reach: Reach


@dataclass(frozen=True)
class LayerCall:
    """One layer's only call in a forward.

    Attributes:
        name: Name of the layer in the model.
        inputs: Index of every tensor among its arguments, by path.
        hidden: Path of the hidden states.
        filled: Paths that lead into containers which earlier layers fill: without these layers
            there is no place for a received tensor.
        output: Template of what it returns (:mod:`~goose_strategy.pipeline_parallel.template`).
    """

    name: str
    inputs: Mapping[Path, int]
    hidden: Path
    filled: frozenset[Path]
    output: Any


@dataclass(frozen=True)
class CutTensor:
    """A tensor that goes from one stage to the next.

    Attributes:
        path: Where the next stage's first layer takes it.
        dtype: As the probe saw it.
        shape: As the probe saw it; rows and columns change from call to call.
        differentiable: Whether a gradient comes back for it (it is floating point).
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    differentiable: bool


@dataclass(frozen=True)
class StackInfo:
    """The stack of layers of a model.

    Attributes:
        stack: Name of the ``nn.ModuleList`` in the model.
        layers: Its layers' calls, in order.
        tensors: Every tensor that a layer took or returned.
        outputs: What the model's outputs were computed from.
        segments: For each module outside the stack that holds parameters, how many layers had
            been called before each of its calls.
    """

    stack: str
    layers: tuple[LayerCall, ...]
    tensors: tuple[TensorFact, ...]
    outputs: Reach
    segments: Mapping[str, frozenset[int]]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @cached_property
    def layer_of_parameter(self) -> Mapping[str, int]:
        """Layer in which each parameter that a layer used was used first."""
        found: dict[str, int] = {}
        prefixes = [f"{layer.name}." for layer in self.layers]
        for reach in [*(fact.reach for fact in self.tensors), self.outputs]:
            for name in reach.parameters:
                for index, prefix in enumerate(prefixes):
                    if name.startswith(prefix):
                        found.setdefault(name, index)
        return found

    def cut(self, boundary: int) -> tuple[CutTensor, ...]:
        """Return what must be sent to a stage that starts at layer ``boundary``.

        Args:
            boundary: Index of the stage's first layer, from 1.

        Returns:
            The tensors in the order in which they are sent; each once, though a layer may take
            it in several places.
        """
        call = self.layers[boundary]
        paths = {token: path for path, token in reversed(list(call.inputs.items()))}
        return tuple(
            CutTensor(
                path=paths[token],
                dtype=self.tensors[token].dtype,
                shape=self.tensors[token].shape,
                differentiable=self.tensors[token].dtype.is_floating_point,
            )
            for token in self.cut_tokens(boundary)
        )

    def cut_tokens(self, boundary: int) -> tuple[int, ...]:
        """Return the indices (in ``tensors``) of what :meth:`cut` describes."""
        tokens = dict.fromkeys(self.layers[boundary].inputs.values())
        return tuple(token for token in tokens if self.tensors[token].carried)

    def injections(self, first: int, layer: int) -> dict[Path, int]:
        """Return where a stage that starts at ``first`` puts received tensors into a layer's call.

        Args:
            first: The stage's first layer.
            layer: The layer that is called.

        Returns:
            For each path the position in :meth:`cut`. Besides the first layer's, these are the
            places in later calls that take the very same tensors.
        """
        order = {token: at for at, token in enumerate(self.cut_tokens(first))}
        inputs = self.layers[layer].inputs
        return {path: order[token] for path, token in inputs.items() if token in order}

    def check_stage(self, first: int, end: int) -> None:
        """Check that layers ``first`` to ``end - 1`` can run as a stage.

        Args:
            first: The stage's first layer.
            end: One past its last layer.

        Raises:
            PlanError: If one of its layers, or what follows the last, uses something from before
                ``first`` that is not among the arguments of the call of layer ``first``.
        """
        received = set(self.cut_tokens(first)) if first > 0 else set()
        for call in self.layers[first:end]:
            for path, token in call.inputs.items():
                fact = self.tensors[token]
                # What is differentiable is followed through the graph instead.
                silent = fact.carried and not fact.differentiable
                if silent and token not in received and fact.known_at <= first:
                    self._refuse(first, f"{call.name} takes {show(path)}")
        for call in self.layers[first : end + 1]:
            for path in call.filled:
                if call.inputs[path] in received:
                    self._refuse(first, f"{call.name} takes {show(path)}, which they fill")
        for name in self.reached(first, end):
            if self.layer_of_parameter.get(name, first) < first:
                user = self.layers[end].name if end < self.num_layers else "the model's head"
                self._refuse(first, f"{user} depends on {name}")

    def _refuse(self, first: int, what: str) -> None:
        name = self.layers[first].name
        raise PlanError(
            f"The model cannot be cut before {name}: what earlier layers computed comes to the "
            f"later ones by another way than the arguments of {name} ({what}). Choose another "
            "partition.",
            axis="pp",
        )

    def reached(self, first: int, end: int) -> frozenset[str]:
        """Return the parameters that a stage's outputs depend on, given what it receives.

        Args:
            first: The stage's first layer.
            end: One past its last layer.

        Returns:
            Names of parameters, the stage's layers' and others.
        """
        received = set(self.cut_tokens(first)) if first > 0 else set()
        names: set[str] = set()
        if end == self.num_layers:
            names |= self.outputs.parameters
            todo = list(self.outputs.tensors)
        else:
            # What only passes through is received and sent on.
            todo = [token for token in self.cut_tokens(end) if token not in received]
        seen: set[int] = set()
        while todo:
            token = todo.pop()
            if token in seen:
                continue
            seen.add(token)
            names |= self.tensors[token].reach.parameters
            injected = received & self._inputs_of_maker(token, first)
            todo += self.tensors[token].reach.tensors - injected
        return frozenset(names)

    def _inputs_of_maker(self, token: int, first: int) -> set[int]:
        """Return the inputs of the layer that returned a tensor, if it is not before ``first``.

        Only a layer's arguments can be replaced by what was received. Code between layers goes on
        with what the replay has in its variables.
        """
        layer = self.tensors[token].made_by
        if layer is None or layer < first:
            return set()
        return set(self.layers[layer].inputs.values())
