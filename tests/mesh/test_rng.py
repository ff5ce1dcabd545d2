"""Seeds per axis."""

import itertools

from goose_strategy.mesh.axis import MeshAxis
from goose_strategy.mesh.layout import Coordinates, MeshLayout
from goose_strategy.mesh.rng import axis_seed

ALL = [Coordinates(*at) for at in itertools.product(range(3), range(3), range(3))]


def test_dp_shares_and_the_others_do_not():
    seeds = {at: axis_seed(7, at) for at in ALL}
    for at in ALL:
        assert seeds[at] == seeds[at._replace(dp=0)]
    assert len(set(seeds.values())) == 9


def test_any_axes_can_share():
    everywhere = {axis_seed(7, at, same_over=tuple(MeshAxis)) for at in ALL}
    assert everywhere == {7}
    assert len({axis_seed(7, at, same_over=()) for at in ALL}) == 27
    assert axis_seed(7, Coordinates(1, 2, 2), same_over=(MeshAxis.TP,)) == axis_seed(
        7, Coordinates(1, 2, 0), same_over=(MeshAxis.TP,)
    )


def test_one_process_draws_what_it_drew_without_a_mesh():
    assert axis_seed(123, MeshLayout(tp=1, pp=1, dp=1).coordinates(0)) == 123


def test_seeds_are_stable_and_fit_numpy():
    assert axis_seed(7, Coordinates(1, 0, 0)) == 172001266
    assert all(0 <= axis_seed(2**63, at) < 2**32 for at in ALL if at.pp or at.tp)
    assert axis_seed(7, Coordinates(1, 0, 0)) != axis_seed(8, Coordinates(1, 0, 0))
