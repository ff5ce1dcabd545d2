"""Rank arithmetic, against the formula and against reshaping the ranks."""

import itertools

import pytest
import torch

from goose_strategy.errors import ConfigError, MeshError
from goose_strategy.mesh.axis import MeshAxis
from goose_strategy.mesh.layout import Coordinates, MeshLayout

LAYOUTS = [
    MeshLayout(tp=tp, pp=pp, dp=dp)
    for tp, pp, dp in itertools.product((1, 2, 3), (1, 2, 4), (1, 2))
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rank_and_coordinates_are_inverse(layout):
    grid = torch.arange(layout.world_size).view(layout.pp, layout.dp, layout.tp)
    for pp, dp, tp in itertools.product(range(layout.pp), range(layout.dp), range(layout.tp)):
        rank = int(grid[pp, dp, tp])
        assert layout.rank(Coordinates(pp, dp, tp)) == rank
        assert layout.coordinates(rank) == Coordinates(pp=pp, dp=dp, tp=tp)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("axis", MeshAxis)
def test_axis_groups_partition_the_world(layout, axis):
    groups = layout.axis_groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {layout.size(axis)}
    for group in groups:
        for rank in group:
            assert layout.axis_ranks(rank, axis) == group


def test_groups_of_a_known_mesh():
    layout = MeshLayout(tp=2, pp=2, dp=2)
    assert layout.axis_groups(MeshAxis.TP) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.axis_groups(MeshAxis.DP) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.axis_groups(MeshAxis.PP) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.model_groups() == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert layout.plane_groups() == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert layout.tie_groups() == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.stage_rank(3, 1) == 7


def test_ties_skip_the_stages_between():
    assert MeshLayout(tp=1, pp=4, dp=2).tie_groups() == ((0, 6), (1, 7))
    assert MeshLayout(tp=2, pp=1, dp=2).tie_groups() == ()


def test_world_gives_dp():
    assert MeshLayout.from_world(8, tp=2, pp=2) == MeshLayout(tp=2, pp=2, dp=2)


def test_sizes_that_do_not_multiply_name_what_does():
    with pytest.raises(ConfigError) as caught:
        MeshLayout.from_world(8, tp=3, pp=2)
    assert str(caught.value) == (
        "tp=3 x pp=2 = 6 does not divide world_size=8; with pp=2 choose tp from 1, 2, 4; or start "
        "a multiple of 6 ranks."
    )
    with pytest.raises(ConfigError, match=r"with tp=2 choose pp from 1, 2, 4; or"):
        MeshLayout.from_world(8, tp=2, pp=3)


@pytest.mark.parametrize("sizes", [{"tp": 0, "pp": 1}, {"tp": 1, "pp": -1}, {"tp": 1.0, "pp": 1}])
def test_bad_sizes_are_refused(sizes):
    with pytest.raises(ConfigError, match=r"(tp|pp)="):
        MeshLayout.from_world(4, **sizes)


def test_places_outside_are_refused():
    layout = MeshLayout(tp=2, pp=1, dp=1)
    with pytest.raises(MeshError, match="rank=2 is not in this mesh"):
        layout.coordinates(2)
    with pytest.raises(MeshError, match="tp_rank=2 is not in this mesh"):
        layout.rank(Coordinates(0, 0, 2))
    with pytest.raises(MeshError, match="pp_rank=1"):
        layout.stage_rank(0, 1)
