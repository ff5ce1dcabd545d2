"""The cut of a stack of layers whose busiest rank has the least to do.

torch's pipelining and DeepSpeed know one stage per rank. Where a rank holds several, its work is
their sum, and a cut that is best for the stages need not be best for the ranks. Everything is in
whole numbers (multiplications, nanoseconds, bytes), so that a tie is a tie.

One stage per rank and the V are exact. For a loop of several stages per rank the sums couple all
stages, and the best of some starts is improved layer by layer; where all layers cost the same, that
is exact, too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.tables.chunks import Chunks

Bounds: TypeAlias = tuple[int, ...]
_Grade: TypeAlias = tuple[int, ...]
_MORE_STARTS = 6
_Outside: TypeAlias = tuple[int, int]
"""Layers in front of what is left, and the end of it."""


@dataclass(frozen=True)
class Load:
    """What a stage costs: its base, its layers, and a part of them that counts several times.

    Attributes:
        layers: Cost of each layer, on whatever stage it is.
        base: Cost of each stage besides its layers.
        held: A further cost of each layer, which counts ``factors[stage]`` times: the activations
            of one microbatch, of which a stage holds several. None if empty.
        factors: How often, per stage.
    """

    layers: tuple[int, ...]
    base: tuple[int, ...]
    held: tuple[int, ...] = ()
    factors: tuple[int, ...] = ()

    @cached_property
    def _sums(self) -> list[int]:
        return list(itertools.accumulate(self.layers, initial=0))

    @cached_property
    def _held_sums(self) -> list[int]:
        return list(itertools.accumulate(self.held or (0,) * len(self.layers), initial=0))

    def of(self, stage: int, first: int, end: int) -> int:
        """Return the cost of a stage with the layers ``first`` to ``end - 1``."""
        cost = self.base[stage] + self._sums[end] - self._sums[first]
        if self.held:
            cost += self.factors[stage] * (self._held_sums[end] - self._held_sums[first])
        return cost

    def least(self, stages: range, first: int, end: int) -> int:
        """Return what layers cost at least, however they are cut among some stages."""
        cost = sum(self.base[stage] for stage in stages) + self._sums[end] - self._sums[first]
        if self.held:
            factor = min(self.factors[stage] for stage in stages)
            cost += factor * (self._held_sums[end] - self._held_sums[first])
        return cost

    def by_stage(self, bounds: Sequence[int]) -> list[int]:
        """Return the cost of every stage."""
        return [self.of(stage, *pair) for stage, pair in enumerate(itertools.pairwise(bounds))]

    def by_rank(self, bounds: Sequence[int], chunks: Chunks) -> list[int]:
        """Return the cost of every rank, the sum of its stages'."""
        costs = [0] * chunks.ranks
        for stage, cost in enumerate(self.by_stage(bounds)):
            costs[chunks.holders[stage]] += cost
        return costs


def best_cut(load: Load, chunks: Chunks) -> Bounds:
    """Cut layers into contiguous stages so that the busiest rank has as little as possible.

    Among cuts with the same busiest rank the ranks' sum of squares decides, then the stages', then
    fewer layers in front: the further forward a stage is, the more microbatches' activations it
    holds.

    Args:
        load: What everything costs.
        chunks: Which rank holds which stages; not more stages than layers.

    Returns:
        ``stages + 1`` bounds; every stage has a layer.
    """
    if chunks.per_rank == 1:
        return _chain(load, chunks.stages)
    layers = len(load.layers)
    starts = {_even(layers, chunks.stages), _chain(load, chunks.stages)}
    # Where layers differ, a few more starts find what the first two miss; the same on every rank.
    draw = random.Random(0)
    for _ in range(_MORE_STARTS if len(set(load.layers)) > 1 else 0):
        inner = draw.sample(range(1, layers), chunks.stages - 1)
        starts.add((0, *sorted(inner), layers))
    improved = [_improve(load, chunks, start) for start in sorted(starts)]
    found = min(improved, key=lambda bounds: (_score(load, chunks, bounds), bounds))
    if chunks.style == "loop":
        return found
    limit = max(load.by_rank(found, chunks))
    limit = _fold(load, chunks.ranks, limit, _busiest)[0][0]
    path = _fold(load, chunks.ranks, limit, _squares)[1]
    counts = [*path[::2], *reversed(path[1::2])]
    return tuple(itertools.accumulate(counts, initial=0))


def _even(layers: int, stages: int) -> Bounds:
    return tuple(layers * stage // stages for stage in range(stages + 1))


def _busiest(before: _Grade, costs: tuple[int, ...]) -> _Grade:
    """Grade ranks by the busiest one."""
    return (max(before[0] if before else 0, sum(costs)),)


def _squares(before: _Grade, costs: tuple[int, ...]) -> _Grade:
    """Grade ranks by their sum of squares, then by that of their stages."""
    ranks, stages = before or (0, 0)
    return ranks + sum(costs) ** 2, stages + sum(cost * cost for cost in costs)


def _chain(load: Load, stages: int) -> Bounds:
    """Cut into one stage per rank: exact, by dynamic programming over first layers and stages."""
    limit = max(load.by_stage(_even(len(load.layers), stages)))
    limit = _chain_graded(load, stages, limit, _busiest)[0][0]
    counts = _chain_graded(load, stages, limit, _squares)[1]
    return tuple(itertools.accumulate(counts, initial=0))


def _chain_graded(
    load: Load, stages: int, limit: int, grade: Callable[[_Grade, tuple[int, ...]], _Grade]
) -> tuple[_Grade, tuple[int, ...]]:
    """Return the best grade of all cuts whose stages keep a limit, and its numbers of layers."""
    last = len(load.layers)
    # By the number of layers that the stages so far have.
    best: dict[int, tuple[_Grade, tuple[int, ...]]] = {0: ((), ())}
    for stage in range(stages):
        further: dict[int, tuple[_Grade, tuple[int, ...]]] = {}
        left = stages - stage - 1
        for start, (before, counts) in best.items():
            for stop in range(start + 1, last - left + 1) if left else [last]:
                cost = load.of(stage, start, stop)
                if cost > limit:
                    break
                found = grade(before, (cost,)), (*counts, stop - start)
                if stop not in further or found < further[stop]:
                    further[stop] = found
        best = further
    return best[last]


def _fold(
    load: Load, ranks: int, limit: int, grade: Callable[[_Grade, tuple[int, ...]], _Grade]
) -> tuple[_Grade, tuple[int, ...]]:
    """Cut into a V: rank after rank takes a stage from the front and one from the back.

    Args:
        load: What everything costs.
        ranks: Number of ranks; they have two stages each.
        limit: What no rank may exceed; some cut must keep it.
        grade: ``(grade of the ranks before, costs of a rank's stages) -> grade``.

    Returns:
        The best grade of all cuts within the limit, and the numbers of layers of the stages
        ``0, 2 * ranks - 1, 1, 2 * ranks - 2, ...`` that have it.
    """
    best: dict[_Outside, tuple[_Grade, tuple[int, ...]]] = {(0, len(load.layers)): ((), ())}
    for rank in range(ranks):
        further: dict[_Outside, tuple[_Grade, tuple[int, ...]]] = {}
        for (first, end), (before, path) in best.items():
            for outside, costs in _folds(load, ranks, rank, (first, end), limit):
                front, back = outside
                found = grade(before, costs), (*path, front - first, end - back)
                if outside not in further or found < further[outside]:
                    further[outside] = found
        best = further
    return min(best.values())


def _folds(
    load: Load, ranks: int, rank: int, inside: _Outside, limit: int
) -> Iterator[tuple[_Outside, tuple[int, int]]]:
    """Yield what a rank can take of the layers that the ranks before it have left."""
    first, end = inside
    left = ranks - rank - 1
    stages = range(rank + 1, 2 * ranks - 1 - rank)
    for front in range(first + 1, end - 2 * left):
        own = load.of(rank, first, front)
        if own > limit:
            return
        for back in range(end - 1, front + 2 * left - 1, -1) if left else [front]:
            other = load.of(2 * ranks - 1 - rank, back, end)
            if own + other > limit:
                break
            # The ranks behind must be able to take the rest.
            if not left or load.least(stages, front, back) <= left * limit:
                yield (front, back), (own, other)


def _score(load: Load, chunks: Chunks, bounds: Bounds) -> tuple[int, int, int]:
    stages, ranks = load.by_stage(bounds), load.by_rank(bounds, chunks)
    return max(ranks), sum(cost * cost for cost in ranks), sum(cost * cost for cost in stages)


def _improve(load: Load, chunks: Chunks, bounds: Bounds) -> Bounds:
    """Let stages hand single layers to one another for as long as that makes the cut better."""
    score = _score(load, chunks, bounds)
    while True:
        tried = ((_score(load, chunks, other), other) for other in _neighbours(bounds))
        better = next((found for found in tried if found[0] < score), None)
        if better is None:
            return bounds
        score, bounds = better


def _neighbours(bounds: Bounds) -> Iterator[Bounds]:
    """Yield the cuts in which one stage has a layer less and another one more."""
    inner = range(1, len(bounds) - 1)
    for start in inner:
        for stop in range(start + 1, len(bounds)):
            for step in (-1, 1):
                moved = [bound + step for bound in bounds[start:stop]]
                if bounds[start - 1] < moved[0] and moved[-1] < bounds[stop]:
                    yield (*bounds[:start], *moved, *bounds[stop:])
