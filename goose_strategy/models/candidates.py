"""Ways to cut one block of linear layers, best first.

That layers form a block says neither where a fused matrix has its seams nor which numbers of a
module count heads. What is plausible is listed here; trying it out decides (see `deduce`). The last
way that cuts anything gathers what the columns give and splits what the rows take: what happens in
between then sees all features, so that it is right for a mixer of any kind, at the price of that
work on every rank.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from goose_strategy.compat.transformers import is_conv1d, text_size
from goose_strategy.tensor_parallel.plan import Style, generic_name, parent_name

if TYPE_CHECKING:
    from goose_strategy.models.roles import Block

_HEADS = re.compile(r"head|^nh$")
_WIDTHS_OF_ONE = re.compile(r"dim|size")
_Packed = Mapping[str, tuple[int, ...]]
_Counts = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Way:
    """One way to cut a part of a model; the fields are those of `TensorPlan`.

    Attributes:
        rules: Module or parameter -> style.
        packed: Column layer of several matrices -> their ratios.
        counts: Module -> its attributes that tp divides.
        guessed: Parameters whose style is to be found out.
        gathers: Whether the work in between is done on every rank.
    """

    rules: Mapping[str, Style] = field(default_factory=dict)
    packed: _Packed = field(default_factory=dict)
    counts: _Counts = field(default_factory=dict)
    guessed: frozenset[str] = frozenset()
    gathers: bool = False


@dataclass(frozen=True)
class _Sizes:
    """What the config says of heads."""

    heads: int
    kv_heads: int
    tp: int

    @classmethod
    def of(cls, model: nn.Module, tp: int) -> _Sizes:
        heads = text_size(model, "num_attention_heads") or 0
        return cls(heads, text_size(model, "num_key_value_heads") or heads, tp)


def ways_of(block: Block, model: nn.Module, tp: int) -> list[Way]:
    """Return the ways to cut a block, best first; the last one leaves it whole.

    Args:
        block: The block.
        model: A model with the block's layers in it, whose parameters are looked at for shapes.
        tp: Into how many parts.
    """
    sizes = _Sizes.of(model, tp)
    modules = {generic_name(name): module for name, module in model.named_modules()}
    ways: list[Way] = []
    if not block.shared and not _misfit(block, sizes):
        for packed, counts in itertools.product(
            _packings(block, sizes), _all_counts(block, modules, sizes)
        ):
            ways.append(_cut(block, packed, counts, sizes))
    gathered = _gathered(block, modules, tp)
    return [*ways, *([gathered] if gathered.rules else []), Way()]


def _misfit(block: Block, sizes: _Sizes) -> bool:
    """Tell whether the block cannot be cut into parts of its own."""
    every = [*block.rows.values(), *block.columns.values()]
    return any(size % sizes.tp for size in every)


def _cut(block: Block, packed: _Packed, counts: _Counts, sizes: _Sizes) -> Way:
    rules = dict.fromkeys(block.columns, Style.COLUMN) | dict.fromkeys(block.rows, Style.ROW)
    lengths = {*block.rows.values(), *block.columns.values(), sizes.heads}
    guessed = set[str]()
    for name, shape in block.between.items():
        if shape and shape[0] in lengths and shape[0] % sizes.tp == 0:
            # One number (or row) for each head or each feature that is cut.
            rules[name] = Style.COLUMN
        else:
            rules[name] = Style.PARTIAL
            guessed.add(name)
    return Way(rules, packed, counts, frozenset(guessed))


def _packings(block: Block, sizes: _Sizes) -> list[_Packed]:
    """Return where the seams of fused matrices may be."""
    options = [
        [(name, ratio) for ratio in _ratios(out, block, sizes)]
        for name, out in block.columns.items()
    ]
    return [
        {name: ratio for name, ratio in chosen if ratio} for chosen in itertools.product(*options)
    ]


def _ratios(out: int, block: Block, sizes: _Sizes) -> list[tuple[int, ...]]:
    """Return the matrices side by side that a column layer may be made of; ``()`` for one."""
    width = next(iter(block.rows.values()))
    alone = len(block.columns) == 1
    found: list[tuple[int, ...]] = []
    heads, kv_heads = sizes.heads, sizes.kv_heads
    if heads and kv_heads and not width % heads:
        one = width // heads
        if alone and out == width + 2 * kv_heads * one:
            found.append((heads, kv_heads, kv_heads))
        elif not alone and out == 2 * kv_heads * one:
            found.append((1, 1))
    if out in (2 * width, 3 * width):
        ratio = (1,) * (out // width)
        if ratio not in found:
            found.append(ratio)
    fits = [r for r in found if not any(out * part // sum(r) % sizes.tp for part in r)]
    # Heads (or features) of all kinds may lie side by side instead.
    return [*dict.fromkeys(fits), ()]


def _all_counts(block: Block, modules: Mapping[str, nn.Module], sizes: _Sizes) -> list[_Counts]:
    """Return which numbers of the block's modules may have to be divided, likeliest first."""
    near = {parent_name(name) for name in block.layers}
    near |= {name for name in map(parent_name, near) if name.startswith(block.name)}
    near.add(block.name)
    heads: dict[str, tuple[str, ...]] = {}
    widths: dict[str, tuple[str, ...]] = {}
    in_config: dict[str, tuple[str, ...]] = {}
    for name in sorted(near & modules.keys()):
        found = _numbers(modules[name], block, sizes)
        for kind, into in zip(found, (heads, widths, in_config), strict=True):
            if kind:
                into[name] = kind
    everything = _joined(heads, widths)
    options = [everything, heads, {}, _joined(everything, in_config), _joined(heads, in_config)]
    return [way for at, way in enumerate(options) if way not in options[:at]]


def _joined(*parts: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    names = {name for part in parts for name in part}
    return {name: tuple(n for part in parts for n in part.get(name, ())) for name in sorted(names)}


def _numbers(
    module: Any, block: Block, sizes: _Sizes
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return a module's numbers of heads, its numbers of features, and the config's of heads.

    Only those count that its methods read: dividing others would have no effect.
    """
    read = _names_read(type(module))
    own = {
        name: value
        for name, value in vars(module).items()
        if name in read and isinstance(value, int) and not isinstance(value, bool)
    }
    counted = {n for n in (sizes.heads, sizes.kv_heads) if n and n % sizes.tp == 0}
    lengths = {n for n in (*block.rows.values(), *block.columns.values()) if n % sizes.tp == 0}
    heads = tuple(
        name
        for name, value in own.items()
        if value in counted and _HEADS.search(name) and not _WIDTHS_OF_ONE.search(name)
    )
    widths = tuple(name for name, value in own.items() if value in lengths and name not in heads)
    config = getattr(module, "config", None)
    names = ("num_attention_heads", "num_key_value_heads", "n_head", "num_heads")
    of_config = tuple(
        f"config.{name}"
        for name in names
        if "config" in read and name in read and getattr(config, name, None) in counted
    )
    return heads, widths, of_config


def _names_read(cls: type) -> set[str]:
    """Return the names of attributes that methods of a class read, its constructor aside."""
    names: set[str] = set()
    for base in cls.__mro__:
        if base is nn.Module:
            break
        for name, method in vars(base).items():
            code = getattr(method, "__code__", None)
            wrapped = getattr(getattr(method, "__wrapped__", None), "__code__", None)
            if name != "__init__":
                names.update(n for c in (code, wrapped) if c is not None for n in c.co_names)
    return names


def _gathered(block: Block, modules: Mapping[str, nn.Module], tp: int) -> Way:
    """Cut the weights alone: outputs are gathered, inputs are split."""
    rules: dict[str, Style] = {}
    sides = ((Style.GATHERED, block.columns), (Style.SPLIT, block.rows))
    for style, layers in sides:
        for name, size in layers.items():
            if size % tp == 0 and not is_conv1d(modules[name]):
                rules[name] = style
    return Way(rules, gathers=True)
