"""Tensor-parallel plans: which module is cut how, as data.

transformers names its styles after DTensor placements and applies them to each module alone, which
costs one all-reduce per column layer in the backward. A `TensorPlan` also knows *islands*: parents
whose column layers all read one input, which then need one all-reduce together (Shoeybi et al.
2019, arXiv:1909.08053, figure 3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    GATHERED = "gathered"
    """A column layer whose output is put together again, for modules that need all of it."""
    SPLIT = "split"
    """A row layer whose input is whole: each rank takes its slice of it."""
    KEY_VALUE = "key_value"
    """A linear layer of fewer key or value heads than tp ranks: kept whole, of its output each rank
    computes the one head that its queries use."""
    EXPERTS = "experts"
    """The stacked feed-forward matrices of a mixture: each expert's width is cut, the output is
    summed over tp."""
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


WHOLE = (Style.PARTIAL, Style.KEY_VALUE)
"""Styles of layers kept whole whose gradient each rank sees a share of."""


@dataclass(frozen=True, kw_only=True)
class Attention:
    """What has to be known of a family's attention modules beside their layers' styles.

    Args:
        module: Name of the module, with ``*`` for the layer number.
        heads: Name of the config's number of query heads.
        kv_heads: Name of its number of key and value heads.
        key_value: Layers of the module whose output is key or value heads alone; they may be kept
            whole where there are fewer of these heads than ranks. Empty where they are fused.
        groups: Attribute of the module that counts the query heads of one key head.
        numbers: Attributes of the module that count something cut, divided by tp on every rank;
            ``config.x`` for what its forward reads from the config.
        sliced: Arguments of its forward that may have something for each head.
    """

    module: str
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    key_value: tuple[str, ...] = ()
    groups: str = "num_key_value_groups"
    numbers: tuple[str, ...] = ()
    sliced: tuple[str, ...] = ()


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
        packed: Column layer that is several matrices side by side -> their widths, or the ratios.
        counts: Module -> its attributes that count something cut, divided by tp on every rank;
            ``config.x`` for what its forward reads from the config.
        attention: What else is known of the attention modules.
        kv_heads: Key and value heads of layers with `Style.KEY_VALUE`.
        whole_attention: Leave attention whole where tp does not divide its heads.
        guessed: Rules that nobody gave: `Style.PARTIAL` until it was tried out.
        proved: Whether it was compared with one process; others are tried out before their use.
        gather_logits: Whether the output carries whole logits even when labels are passed.
    """

    family: str
    rules: Mapping[str, Style]
    islands: Mapping[str, str] = field(default_factory=dict)
    divisible: Mapping[str, int] = field(default_factory=dict)
    packed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    counts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attention: Attention | None = None
    kv_heads: int = 1
    whole_attention: bool = False
    guessed: frozenset[str] = frozenset()
    proved: bool = False
    gather_logits: bool = False

    def style_of(self, name: str) -> Style | None:
        """Return the style of the module or parameter ``name``, if a rule names it."""
        return self.rules.get(generic_name(name))

    def island_argument(self, name: str) -> str | None:
        """Return the argument that feeds the column layers of ``name``, if it is an island."""
        return self.islands.get(generic_name(name))

    def packed_of(self, name: str) -> tuple[int, ...]:
        """Return the widths of the matrices that the column layer ``name`` is made of."""
        return self.packed.get(generic_name(name), ())

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
                return Style.PARTIAL if style in WHOLE else Style.REPLICATED
            if name in self.islands:
                return Style.PARTIAL
            name = parent_name(name)
        return Style.REPLICATED

    def fitted(self, tp: int) -> TensorPlan:
        """Return the plan for ``tp`` ranks.

        Where tp is a multiple of the key and value heads, their layers stay whole and each rank
        uses one head; where tp does not fit the heads otherwise, attention stays whole if that was
        allowed.

        Raises:
            PlanError: If ``tp`` does not divide a size; the message lists what works.
        """
        plan = self._fitted(tp)
        wrong = {name: size for name, size in plan.divisible.items() if size % tp}
        if not wrong:
            return plan
        listed = ", ".join(f"{name}={size}" for name, size in wrong.items())
        candidates = range(1, max(self.divisible.values()) + 1)
        works = ", ".join(str(size) for size in candidates if self._fits(size))
        heads = self.attention is not None and wrong.keys() & {
            self.attention.heads,
            self.attention.kv_heads,
        }
        whole = (
            "; or keep attention whole with TensorConfig(allow_replicated_attention=True)"
            if heads
            else ""
        )
        raise PlanError(
            f"tp={tp} does not divide {listed} of this {self.family} model; "
            f"tp sizes that work: {works}{whole}.",
            axis="tp",
        )

    def _fits(self, tp: int) -> bool:
        return not any(size % tp for size in self._fitted(tp).divisible.values())

    def _fitted(self, tp: int) -> TensorPlan:
        attention = self.attention
        if attention is None:
            return self
        heads = self.divisible.get(attention.heads, 0)
        kv_heads = self.divisible.get(attention.kv_heads, heads)
        if not heads % tp and not kv_heads % tp:
            return self
        names = {attention.heads, attention.kv_heads}
        others = {name: size for name, size in self.divisible.items() if name not in names}
        if attention.key_value and not heads % tp and not tp % kv_heads:
            kept = {f"{attention.module}.{name}": Style.KEY_VALUE for name in attention.key_value}
            sizes = {**others, attention.heads: heads}
            rules = {**self.rules, **kept}
            return replace(self, rules=rules, divisible=sizes, kv_heads=kv_heads)
        if not self.whole_attention:
            return self
        return replace(self.without_attention(), divisible=others)

    def without_attention(self) -> TensorPlan:
        """Return the plan with every attention module whole, and its gradients with it."""
        if self.attention is None:
            return self
        module = self.attention.module
        inside = f"{module}."
        rules = {
            name: style
            for name, style in self.rules.items()
            if name != module and not name.startswith(inside)
        }
        islands = {name: argument for name, argument in self.islands.items() if name != module}
        return replace(self, rules=rules, islands=islands, attention=None)
