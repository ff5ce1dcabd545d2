"""No cut has a busiest rank with less to do: all cuts of small models are tried."""

from __future__ import annotations

import itertools
import random

import pytest

from goose_strategy.pipeline_parallel.balance import Work
from goose_strategy.pipeline_parallel.minmax import Bounds, Load, best_cut
from goose_strategy.pipeline_parallel.tables.chunks import Chunks


def score(load: Load, chunks: Chunks, bounds: Bounds) -> tuple[int, int, int]:
    """What a cut is judged by, written down anew."""
    stages, ranks = [], [0] * chunks.ranks
    for stage in range(chunks.stages):
        own = range(bounds[stage], bounds[stage + 1])
        cost = load.base[stage] + sum(load.layers[layer] for layer in own)
        if load.held:
            cost += load.factors[stage] * sum(load.held[layer] for layer in own)
        stages.append(cost)
        ranks[chunks.rank_of(stage)] += cost
    return max(ranks), sum(cost**2 for cost in ranks), sum(cost**2 for cost in stages)


def every_cut(layers: int, stages: int) -> list[Bounds]:
    inner = itertools.combinations(range(1, layers), stages - 1)
    return [(0, *bounds, layers) for bounds in inner]


def random_load(draw: random.Random, layers: int, stages: int, *, alike: bool = False) -> Load:
    costs = (draw.randint(1, 6),) * layers if alike else draws(draw, layers, 0, 9)
    work = Work(draw.randint(0, 9), costs, draw.randint(0, 14)).load(stages)
    if alike or draw.random() < 0.5:
        return work
    return Load(work.layers, work.base, draws(draw, layers, 0, 5), draws(draw, stages, 1, 4))


def draws(draw: random.Random, number: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw.randint(low, high) for _ in range(number))


@pytest.mark.parametrize("style", ["chain", "v"])
def test_chains_and_vs_are_the_best_there_are(style: str) -> None:
    draw = random.Random(7)
    for _ in range(150):
        ranks = draw.randint(1, 5 if style == "chain" else 3)
        chunks = Chunks(ranks) if style == "chain" else Chunks(ranks, 2, "v")
        layers = draw.randint(chunks.stages, 9)
        load = random_load(draw, layers, chunks.stages)
        best = min(every_cut(layers, chunks.stages), key=lambda b: score(load, chunks, b))
        found = best_cut(load, chunks)
        assert score(load, chunks, found) == score(load, chunks, best), (load, chunks, found, best)


def test_loops_of_equal_layers_are_the_best_there_are() -> None:
    draw = random.Random(8)
    for _ in range(60):
        chunks = Chunks(draw.randint(1, 3), draw.randint(2, 3))
        layers = draw.randint(chunks.stages, 10)
        load = random_load(draw, layers, chunks.stages, alike=True)
        best = min(score(load, chunks, bounds) for bounds in every_cut(layers, chunks.stages))
        assert score(load, chunks, best_cut(load, chunks)) == best, (load, chunks)


def test_loops_of_any_layers_are_nearly_so() -> None:
    draw = random.Random(9)
    ratios = []
    for _ in range(100):
        chunks = Chunks(draw.randint(2, 3), 2)
        layers = draw.randint(chunks.stages, 10)
        load = random_load(draw, layers, chunks.stages)
        best = min(score(load, chunks, bounds) for bounds in every_cut(layers, chunks.stages))
        found = score(load, chunks, best_cut(load, chunks))
        ratios.append(found[0] / best[0])
    assert min(ratios) == 1
    assert sum(ratio > 1 for ratio in ratios) <= 10
    assert max(ratios) < 1.1


def test_figures_of_a_load() -> None:
    load = Load((1, 2, 3), (10, 20), (1, 1, 1), (4, 5))
    assert load.by_stage((0, 1, 3)) == [10 + 1 + 4, 20 + 5 + 10]
    assert load.by_rank((0, 1, 3), Chunks(1, 2)) == [50]
    assert load.least(range(2), 0, 3) == 30 + 6 + 4 * 3


@pytest.mark.parametrize(
    ("work", "stages", "counts"),
    [
        (Work(0, (1,) * 8, 3), 4, [2, 2, 3, 1]),
        (Work(0, (1,) * 8, 0), 4, [2, 2, 2, 2]),
        (Work(0, (1,) * 10, 0), 4, [2, 2, 3, 3]),
        (Work(4, (1,) * 8, 0), 2, [2, 6]),
        (Work(0, (1,) * 4, 100), 4, [1, 1, 1, 1]),
        # Shapes of Llama-3-8B, in units of 2**20: a layer 208, the head 501.
        (Work(0, (208,) * 32, 501), 4, [8, 9, 9, 6]),
        (Work(0, (5, 1, 1, 1, 5), 0), 3, [1, 3, 1]),
    ],
)
def test_known_cuts(work: Work, stages: int, counts: list[int]) -> None:
    bounds = best_cut(work.load(stages), Chunks(stages))
    assert [b - a for a, b in itertools.pairwise(bounds)] == counts


@pytest.mark.timeout(20)
@pytest.mark.parametrize("chunks", [Chunks(16), Chunks(16, 2, "v"), Chunks(16, 4)], ids=str)
def test_a_deep_model_is_cut_at_once(chunks: Chunks) -> None:
    """126 layers; half a second, but the limit is wide."""
    load = Work(10, (208,) * 126, 501).load(chunks.stages)
    ranks = load.by_rank(best_cut(load, chunks), chunks)
    assert max(ranks) * 16 / sum(ranks) < 1.06
