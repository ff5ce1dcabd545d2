"""Every layer is on one stage, and what does not fit is refused by its numbers."""

from __future__ import annotations

import itertools

import pytest

from goose_strategy.errors import ConfigError, PlanError
from goose_strategy.pipeline_parallel.balance import Work
from goose_strategy.pipeline_parallel.minmax import Load
from goose_strategy.pipeline_parallel.partition import PARTITIONS, partition_layers
from goose_strategy.pipeline_parallel.tables.chunks import Chunks


def equal(layers: int, head: int = 0) -> Work:
    """Layers that cost one each."""
    return Work(0, (1,) * layers, head)


@pytest.mark.parametrize(
    ("layers", "stages", "bounds"),
    [
        (4, 2, (0, 2, 4)),
        (4, 4, (0, 1, 2, 3, 4)),
        (4, 3, (0, 1, 3, 4)),
        (5, 2, (0, 3, 5)),
        (10, 4, (0, 2, 5, 8, 10)),
        (7, 1, (0, 7)),
    ],
)
def test_uniform(layers: int, stages: int, bounds: tuple[int, ...]) -> None:
    assert partition_layers("uniform", equal(layers), Chunks(stages)) == bounds


def test_uniform_is_as_even_as_possible() -> None:
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            bounds = partition_layers("uniform", equal(layers), Chunks(stages))
            counts = [b - a for a, b in itertools.pairwise(bounds)]
            assert sum(counts) == layers
            assert max(counts) - min(counts) <= 1
            assert counts[-1] == min(counts)


def test_balanced_leaves_the_last_stage_room_for_the_head() -> None:
    assert partition_layers("balanced", equal(8, head=3), Chunks(4)) == (0, 2, 4, 7, 8)
    for partition in ("balanced", "uniform"):
        assert partition_layers(partition, equal(8), Chunks(4)) == (0, 2, 4, 6, 8)


def test_the_head_is_weighed_with_both_stages_of_its_rank() -> None:
    """In a V the last stage is on the first rank, in a loop on the last one."""
    v = partition_layers("time", equal(12, head=3), Chunks(3, 2, "v"))
    counts = [b - a for a, b in itertools.pairwise(v)]
    assert (counts[0] + counts[5], counts[1] + counts[4], counts[2] + counts[3]) == (2, 5, 5)
    loop = partition_layers("time", equal(12, head=3), Chunks(3, 2))
    counts = [b - a for a, b in itertools.pairwise(loop)]
    assert (counts[0] + counts[3], counts[1] + counts[4], counts[2] + counts[5]) == (5, 5, 2)


def test_a_load_is_cut_as_it_is() -> None:
    load = Load((1, 1, 1, 1), (0, 0), (1, 1, 1, 1), (5, 1))
    assert partition_layers("memory", load, Chunks(2)) == (0, 1, 4)
    for partition in PARTITIONS:
        assert partition_layers(partition, load, Chunks(1, 2))[::2] == (0, 4)


def test_listed() -> None:
    assert partition_layers([1, 3, 2], equal(6), Chunks(3)) == (0, 1, 4, 6)


@pytest.mark.parametrize(
    ("partition", "stages", "error", "message"),
    [
        ("balanced", 5, PlanError, "pp=5 is more than the model's 4 layers.*choose pp <= 4"),
        ("uniform", 5, PlanError, "pp=5 is more than the model's 4 layers.*choose pp <= 4"),
        ([2, 2], 3, ConfigError, r"partition=\[2, 2\] lists 2 stages but pp=3"),
        ([2, 1], 2, PlanError, r"partition=\[2, 1\] sums to 3, but the model has 4 layers"),
        ([5, -1], 2, PlanError, r"partition=\[5, -1\] sums to 4"),
    ],
)
def test_what_does_not_fit_is_refused(
    partition: str | list[int], stages: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        partition_layers(partition, equal(4), Chunks(stages))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (
            Chunks(2, 3),
            "pp=2 x 3 stages per rank = 6 is more than the model's 4 "
            "layers.*at most 2 per rank .*or pp <= 1",
        ),
        (Chunks(3, 2, "v"), "= 6 is more than.*at most 1 per rank.*or pp <= 2"),
        (Chunks(5, 2), "= 10 is more than.*choose pp <= 2"),
    ],
)
def test_more_stages_than_layers(chunks: Chunks, message: str) -> None:
    for partition in (*PARTITIONS, [1] * chunks.stages):
        with pytest.raises(PlanError, match=message):
            partition_layers(partition, equal(4), chunks)


def test_a_list_names_every_stage_of_every_rank() -> None:
    assert partition_layers([1, 1, 2, 1], equal(5), Chunks(2, 2)) == (0, 1, 2, 4, 5)
    with pytest.raises(ConfigError, match="lists 2 stages but pp=2 x 2 stages per rank = 4"):
        partition_layers([3, 2], equal(5), Chunks(2, 2))
