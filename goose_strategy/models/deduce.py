"""A tensor-parallel plan for a model that nobody gave one for.

transformers has a plan for about half of its causal language models. For the others the layers that
belong together are found in one forward (see `roles`), the ways to cut them are listed (see
`candidates`), and the first that gives the loss, the logits and every gradient of an uncut clone is
taken. So nothing is trusted that was not compared, and what cannot be cut stays whole: that is
exact, but costs memory or work on every rank, and is told in one line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from goose_strategy.comm.collectives import broadcast_object
from goose_strategy.compat.transformers import (
    head_bias_holders,
    input_embedding,
    model_type,
    output_embedding,
)
from goose_strategy.errors import PlanError
from goose_strategy.models.candidates import Way, ways_of
from goose_strategy.models.roles import features, find_blocks
from goose_strategy.models.trial import MISFITS, Trial, Verdict
from goose_strategy.tensor_parallel.experts import check_experts
from goose_strategy.tensor_parallel.layers import cut_dims
from goose_strategy.tensor_parallel.parallelize import check_cut, modules_to_cut
from goose_strategy.tensor_parallel.plan import Style, TensorPlan, generic_name, parent_name

if TYPE_CHECKING:
    from goose_strategy.models.roles import Block
    from goose_strategy.tensor_parallel.config import TensorConfig

LOGGER = logging.getLogger("goose_strategy")
"""Where rank 0 tells what was decided."""

_MOST_TRIALS = 48
_WORTH = 0.01
"""Layers outside of all blocks are cut from this share of the parameters on."""


class Part(NamedTuple):
    """A part of a model that is cut, or not, by itself.

    Attributes:
        name: For messages.
        ways: How it may be cut, best first; the last one leaves it whole.
    """

    name: str
    ways: list[Way]


@dataclass(frozen=True)
class Deduced:
    """A plan that was found and compared.

    Attributes:
        plan: The plan.
        cut: Parts of which every rank has and computes its share.
        gathered: Parts of whose weights every rank has its share, and does all work in between.
        whole: Parts that every rank has and computes.
        replicated: Share of the model's parameters that every rank has.
    """

    plan: TensorPlan
    cut: tuple[str, ...]
    gathered: tuple[str, ...]
    whole: tuple[str, ...]
    replicated: float

    def describe(self, name: str) -> str:
        """Say in one line what was decided for the model ``name``, and what it costs."""
        parts = [
            f"{name} has no tensor-parallel plan that is known to be exact; one was found and "
            f"compared with the uncut model, every gradient. Cut: {', '.join(self.cut) or 'none'}."
        ]
        if self.gathered:
            listed = ", ".join(self.gathered)
            parts.append(f"Weights cut, but the work between them on every tp rank: {listed}.")
        if self.whole:
            parts.append(f"Whole on every tp rank: {', '.join(self.whole)}.")
        parts.append(f"Every tp rank holds {self.replicated:.1%} of the parameters whole.")
        return " ".join(parts)


def deduce_plan(model: nn.Module, config: TensorConfig, trial: Trial) -> Deduced:
    """Find a plan that is exact. Collective over the world.

    Args:
        model: The whole model, before it is cut.
        config: The user's settings.
        trial: What plans are compared with.

    Returns:
        The plan and what it leaves whole; the same on all ranks.

    Raises:
        PlanError: On all ranks, if no part of the model can be cut exactly.
    """
    mesh = trial.mesh
    # What was seen on rank 0 counts, in case the ranks' machines round differently.
    parts = broadcast_object(_parts(trial, mesh.tp_size), source=0, group=mesh.control)
    search = _Search(trial, TensorPlan(family=model_type(model), rules={}))
    chosen, verdict = search.run(parts)
    if verdict.plan is None:
        raise PlanError(
            f"no tensor-parallel plan was found for the family {model_type(model)!r}: the best one "
            f"does not {verdict.reason}. Give one in TensorConfig(rules={{...}}), or use tp=1.",
            axis="tp",
        ) from verdict.cause
    if not any(way.rules for way in chosen):
        raise PlanError(
            f"no part of {type(model).__name__} (family {model_type(model)!r}) can be cut over tp="
            f"{mesh.tp_size} ranks exactly: {search.last or 'it has no pairs of linear layers'}. "
            "Give rules in TensorConfig(rules={...}), or use tp=1.",
            axis="tp",
        )
    plan = TensorPlan(
        family=verdict.plan.family,
        rules=verdict.plan.rules,
        packed=verdict.plan.packed,
        counts=verdict.plan.counts,
        gather_logits=config.gather_logits,
    )
    check_cut(model, plan, mesh.tp_size)
    deduced = _described(model, plan, parts, chosen)
    if mesh.rank == 0:
        tell = LOGGER.warning if deduced.gathered or deduced.whole else LOGGER.info
        tell("%s", deduced.describe(type(model).__name__))
    return deduced


class _Search:
    """Tries ways out, all parts together first, then one by one."""

    def __init__(self, trial: Trial, base: TensorPlan) -> None:
        self._trial = trial
        self._base = base
        self._left = _MOST_TRIALS
        self.last = ""

    def run(self, parts: Sequence[Part]) -> tuple[list[Way], Verdict]:
        """Return a way for each part, and the verdict on all of them together."""
        chosen = [part.ways[0] for part in parts]
        verdict = self._judge(chosen)
        if verdict.plan is not None:
            return chosen, verdict
        chosen = [self._first(part) for part in parts]
        return chosen, self._judge(chosen)

    def _first(self, part: Part) -> Way:
        for way in part.ways[:-1]:
            if self._left > 0 and self._judge([way]).plan is not None:
                return way
        return part.ways[-1]

    def _judge(self, ways: Sequence[Way]) -> Verdict:
        self._left -= 1
        verdict = self._trial.judge(_plan_of(self._base, ways))
        if verdict.plan is None:
            self.last = f"a cut does not {verdict.reason}"
            LOGGER.debug("%s: %s", [sorted(way.rules) for way in ways], verdict.reason)
        return verdict


def _plan_of(base: TensorPlan, ways: Sequence[Way]) -> TensorPlan:
    rules: dict[str, Style] = {}
    for way in ways:
        for name, style in way.rules.items():
            # What one part says of a parameter that it found in passing gives way.
            if name not in rules or rules[name] is Style.PARTIAL:
                rules[name] = style
    guessed = {n for way in ways for n in way.guessed if rules[n] is Style.PARTIAL}
    return TensorPlan(
        family=base.family,
        rules=rules,
        packed={name: ratio for way in ways for name, ratio in way.packed.items()},
        counts={name: numbers for way in ways for name, numbers in way.counts.items()},
        guessed=frozenset(guessed),
    )


def _parts(trial: Trial, tp: int) -> list[Part]:
    """List the parts of the clone with the ways to cut them."""
    clone = trial.clone
    try:
        blocks = find_blocks(clone, trial.look)
    except MISFITS as error:
        raise PlanError(
            f"the layers of {type(clone).__name__} that belong together could not be found: "
            f"{error}. Give a plan in TensorConfig(rules={{...}}), or use tp=1.",
            axis="tp",
        ) from error
    parts = [Part(block.name, ways_of(block, clone, tp)) for block in blocks]
    parts += [Part(name, [Way({name: Style.EXPERTS}), Way()]) for name in _experts(clone, tp)]
    parts += _others(trial, blocks, tp)
    return [*parts, Part("the vocabulary", list(_vocabulary(clone)))]


def _experts(model: nn.Module, tp: int) -> list[str]:
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        try:
            check_experts(name, module, tp)
        except PlanError:
            continue
        found[generic_name(name)] = None
    return list(found)


def _others(trial: Trial, blocks: Sequence[Block], tp: int) -> Iterator[Part]:
    """Yield the large linear layers that are in no block and that the trial uses, by parents."""
    model = trial.clone
    known = {name for block in blocks for name in block.layers}
    known |= {place[0] for place in (output_embedding(model),) if place is not None}
    total = sum(param.numel() for param in model.parameters())
    sizes: dict[str, int] = {}
    misfits: set[str] = set()
    for name, module in model.named_modules():
        pattern = generic_name(name)
        if not isinstance(module, nn.Linear) or pattern in known or "*" not in pattern:
            continue
        if not trial.learns_in(f"{name}.weight"):
            continue
        sizes[pattern] = sizes.get(pattern, 0) + module.weight.numel()
        if features(module)[1] % tp:
            misfits.add(pattern)
    parents: dict[str, dict[str, Style]] = {}
    for pattern, size in sizes.items():
        if size >= _WORTH * total and pattern not in misfits:
            parents.setdefault(parent_name(pattern), {})[pattern] = Style.GATHERED
    for parent, rules in parents.items():
        yield Part(parent, [Way(rules, gathers=True), Way()])


def _vocabulary(model: nn.Module) -> Iterator[Way]:
    """Yield the ways to cut embedding and head: both, one, none."""
    embedding, head = input_embedding(model), output_embedding(model)
    first: dict[str, Style] = {}
    second: dict[str, Style] = {}
    if embedding is not None and isinstance(embedding[1], nn.Embedding):
        first[generic_name(embedding[0])] = Style.VOCAB
    if head is not None and isinstance(head[1], nn.Linear):
        second[generic_name(head[0])] = Style.HEAD
        second |= dict.fromkeys(head_bias_holders(model), Style.COLUMN)
    options = [first | second, second, first]
    for at, rules in enumerate(options):
        if rules and rules not in options[:at]:
            yield Way(rules)
    yield Way()


def _described(
    model: nn.Module, plan: TensorPlan, parts: Sequence[Part], chosen: Sequence[Way]
) -> Deduced:
    pairs = list(zip(parts, chosen, strict=True))
    held = {
        f"{name}.{kind}"
        for name, (module, style) in modules_to_cut(model, plan).items()
        for kind in cut_dims(module, style)
    }
    total = sum(param.numel() for param in model.parameters())
    whole = sum(
        param.numel()
        for name, param in model.named_parameters()
        if name not in held and plan.style_of(name) is not Style.COLUMN
    )
    return Deduced(
        plan,
        cut=tuple(part.name for part, way in pairs if way.rules and not way.gathers),
        gathered=tuple(part.name for part, way in pairs if way.gathers),
        whole=tuple(part.name for part, way in pairs if not way.rules),
        replicated=whole / max(total, 1),
    )
