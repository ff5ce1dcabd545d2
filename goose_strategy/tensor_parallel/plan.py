"""Tensor-parallel plans: which module is cut how, as data.

transformers names its styles after DTensor placements and applies them to each module alone, which
costs one all-reduce per column layer in the backward. A `TensorPlan` also knows *islands*: parents
whose column layers all read one input, which then need one all-reduce together (Shoeybi et al.
2019, arXiv:1909.08053, figure 3).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from goose_strategy.errors import PlanError

_LAYER_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Style(StrEnum):
    """What tensor parallelism does with a module or a parameter."""

    COLUMN = "column"
    """A linear layer whose output features are cut; its output stays cut."""
    ROW = "row"
    """A linear layer whose input features are cut; its output is summed over tp."""
    VOCAB = "vocab"
    """An embedding whose rows (the vocabulary) are cut; its output is summed over tp."""
    HEAD = "head"
    """The output layer: vocabulary cut, logits local for the loss and gathered otherwise."""
    PARTIAL = "partial"
    """Kept whole, between a column and a row layer: each rank sees a share of its gradient."""
    REPLICATED = "replicated"
    """Kept whole, with the whole gradient on every rank."""


def generic_name(name: str) -> str:
    """Replace every layer number by ``*``: ``layers.3.mlp`` becomes ``layers.*.mlp``."""
    return _LAYER_NUMBER.sub("*", name)


def parent_name(name: str) -> str:
    """Return the name of the module that holds ``name``; ``""`` is the model itself."""
    return name.rpartition(".")[0]


def divisors(number: int) -> list[int]:
    """Return all divisors of ``number`` in increasing order."""
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """How one model is cut over the tensor-parallel ranks.

    Args:
        family: Model family, for messages.
        rules: Module or parameter name with ``*`` for layer numbers -> style.
        islands: Name of a parent module -> name of the argument that all its column layers read.
            The copy into the island happens once, on the parent's input; every whole parameter
            inside has a partial gradient.
        divisible: Sizes that tp has to divide, by their name in the model's config.
        gather_logits: Whether the output carries whole logits even when labels are passed.
    """

    family: str
    rules: Mapping[str, Style]
    islands: Mapping[str, str] = field(default_factory=dict)
    divisible: Mapping[str, int] = field(default_factory=dict)
    gather_logits: bool = False

    def style_of(self, name: str) -> Style | None:
        """Return the style of the module or parameter ``name``, if a rule names it."""
        return self.rules.get(generic_name(name))

    def island_argument(self, name: str) -> str | None:
        """Return the argument that feeds the column layers of ``name``, if it is an island."""
        return self.islands.get(generic_name(name))

    def whole_style(self, parameter: str) -> Style:
        """Return how the gradient of a parameter that is not cut arises.

        The closest rule wins: on the parameter, on a module around it, else `Style.PARTIAL` inside
        an island and `Style.REPLICATED` elsewhere. The bias of a row layer is added after the sum,
        so its gradient is whole.
        """
        name = generic_name(parameter)
        while name:
            style = self.rules.get(name)
            if style is not None:
                return Style.PARTIAL if style is Style.PARTIAL else Style.REPLICATED
            if name in self.islands:
                return Style.PARTIAL
            name = parent_name(name)
        return Style.REPLICATED

    def check(self, tp: int) -> None:
        """Check that the model can be cut into ``tp`` parts.

        Raises:
            PlanError: If ``tp`` does not divide a size; the message lists what works.
        """
        wrong = {name: size for name, size in self.divisible.items() if size % tp}
        if not wrong:
            return
        listed = ", ".join(f"{name}={size}" for name, size in wrong.items())
        works = ", ".join(map(str, divisors(math.gcd(*self.divisible.values()))))
        raise PlanError(
            f"tp={tp} does not divide {listed} of this {self.family} model; "
            f"tp sizes that work: {works}.",
            axis="tp",
        )
