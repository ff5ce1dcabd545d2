"""What a model's parts take in time and memory: the figures that a partition is made of.

Measured (:mod:`~goose_strategy.pipeline_parallel.measure`) on one device, and plain numbers from
then on: they travel from the rank that measured to the others, and a cut or a schedule is chosen
from them without any tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from goose_strategy.pipeline_parallel.balance import Work

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.stack import StackInfo

Kind: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True)
class Cost:
    """What one microbatch takes in one part of a model.

    Attributes:
        forward: Nanoseconds of the forward.
        backward_input: Nanoseconds of the gradients of its inputs.
        backward_weight: Nanoseconds of the gradients of its weights.
        saved: Bytes that the forward keeps for the backward.
    """

    forward: int = 0
    backward_input: int = 0
    backward_weight: int = 0
    saved: int = 0

    @property
    def time(self) -> int:
        """Nanoseconds of forward and backward."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Profile:
    """What one microbatch takes in every part of a model.

    Attributes:
        shape: Rows and columns of the microbatch.
        before: What comes before the first layer.
        layers: Every layer.
        after: What comes after the last layer, the head and the loss among it.
        hidden: Bytes of the tensors that go from one stage to the next.
        shared: Bytes of what all layers take and each stage computes itself, such as masks.
        timed: Whether times were measured, or only memory.
    """

    shape: tuple[int, int]
    before: Cost
    layers: tuple[Cost, ...]
    after: Cost
    hidden: int = 0
    shared: int = 0
    timed: bool = True

    def part(self, name: str) -> Work:
        """Return one attribute of `Cost` of every part: ``"forward"``, ``"saved"``, ..."""
        layers = tuple(getattr(layer, name) for layer in self.layers)
        return Work(getattr(self.before, name), layers, getattr(self.after, name))

    def work(self) -> Work:
        """Return the nanoseconds of forward and backward."""
        return self.part("time")


def layer_kinds(model: nn.Module, info: StackInfo) -> list[int]:
    """Tell which layers cost the same.

    Two layers are of one kind if their modules agree in class, in the numbers, strings and flags
    that they hold, and in the shapes of their parameters, and if each is called with the same
    shapes. A number that counts the layers themselves makes no difference.

    Args:
        model: The whole model.
        info: Where its layers are.

    Returns:
        For each layer the index of the first layer of its kind.
    """
    layers = [model.get_submodule(call.name) for call in info.layers]
    values = [_values(layer) for layer in layers]
    telling = _telling(values)
    first: dict[Kind, int] = {}
    kinds = []
    for index, layer in enumerate(layers):
        inputs = info.layers[index].inputs.items()
        facts = [(path, info.tensors[at].shape, info.tensors[at].dtype) for path, at in inputs]
        params = [(n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters()]
        kind = (
            tuple((name, type(module)) for name, module in layer.named_modules()),
            tuple(params),
            tuple((name, repr(values[index].get(name))) for name in telling),
            tuple(facts),
        )
        kinds.append(first.setdefault(kind, index))
    return kinds


def _telling(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names whose values do more than number the layers."""
    every = sorted({name for own in values for name in own})
    return [n for n in every if any(own.get(n) != index for index, own in enumerate(values))]


def _values(layer: nn.Module) -> Mapping[str, Any]:
    return {
        f"{name}.{key}": value
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if key != "training" and isinstance(value, (int, float, str, bool, type(None)))
    }
