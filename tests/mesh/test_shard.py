"""ShardSpec: the box arithmetic against flattening and indexing real tensors."""

import itertools
import math

import pytest
import torch

from goose_strategy.errors import MeshError
from goose_strategy.mesh.shard import Box, ShardSpec

SHAPES = [(), (7,), (3, 5), (1, 4), (4, 1), (2, 3, 4), (3, 1, 2, 2)]


def _spec(shape, **changes):
    given = {
        "name": "w",
        "global_shape": tuple(2 * n + len(shape) for n in shape),
        "offsets": tuple(range(len(shape))),
        "local_shape": shape,
        "dtype": torch.float32,
    }
    return ShardSpec(**{**given, **changes})


def _part(whole, box):
    return whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


def _check_ranges(spec, whole, local, most):
    """Every range's boxes hold its elements, each once, in views of the range itself."""
    flat = local.reshape(-1)
    for start, stop in itertools.combinations_with_replacement(range(spec.numel + 1), 2):
        target = flat[start:stop].clone()
        pieces = spec.flat_range_pieces(target, start, stop)
        for box, view in pieces:
            assert torch.equal(_part(whole, box), view), (start, stop)
            view.fill_(-1)
        assert sum(box.numel for box, _ in pieces) == stop - start
        assert (target == -1).all()
        assert len(pieces) <= most


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_of_every_range_hold_its_elements(shape):
    spec = _spec(shape)
    whole = torch.arange(math.prod(spec.global_shape)).view(spec.global_shape)
    [box] = spec.boxes
    _check_ranges(spec, whole, _part(whole, box), max(2 * len(shape) - 1, 1))


@pytest.mark.parametrize("dim", [0, 1])
def test_runs_are_boxes_of_their_own(dim):
    whole = torch.arange(12 * 12).view(12, 12)
    runs = ((2, 2), (5, 1), (10, 2))
    local = torch.cat([whole.narrow(dim, start, length) for start, length in runs], dim)
    shape = (5, 12) if dim == 0 else (12, 5)
    offsets = (2, 0) if dim == 0 else (0, 2)
    spec = _spec(shape, offsets=offsets, global_shape=(12, 12), tp_dim=dim, runs=runs)
    assert [box.offsets[dim] for box in spec.boxes] == [2, 5, 10]
    assert [box.lengths[dim] for box in spec.boxes] == [2, 1, 2]
    for box, view in spec.pieces(local):
        assert torch.equal(_part(whole, box), view)
        assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    _check_ranges(spec, whole, local, 9)


def test_a_matrix_range_is_head_body_tail():
    spec = _spec((4, 10), offsets=(100, 0), global_shape=(200, 10))

    def boxes(start, stop):
        return [box for box, _ in spec.flat_range_pieces(torch.empty(stop - start), start, stop)]

    assert boxes(7, 34) == [
        Box((100, 7), (1, 3)),
        Box((101, 0), (2, 10)),
        Box((103, 0), (1, 4)),
    ]
    assert boxes(0, 40) == spec.boxes
    assert boxes(12, 15) == [Box((101, 2), (1, 3))]


def test_ranges_outside_are_refused():
    for start, stop in ((-1, 2), (3, 2), (0, 8)):
        with pytest.raises(MeshError, match=f"start={start}, stop={stop}"):
            _spec((7,)).flat_range_pieces(torch.empty(8), start, stop)


def test_replicated_describes_a_whole_tensor():
    spec = ShardSpec.replicated("norm.weight", torch.zeros(5, 2, dtype=torch.float64))
    assert spec.boxes == [Box((0, 0), (5, 2))]
    assert spec.numel == 10
    assert spec.dtype is torch.float64
    assert not spec.is_sharded
    assert ShardSpec.replicated("q_norm.weight", torch.zeros(5), tp_partial=True).tp_partial


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"offsets": (0,)}, "one entry per dimension"),
        ({"offsets": (0, 40)}, "lies outside global_shape"),
        ({"offsets": (-1, 0)}, "lies outside global_shape"),
        ({"tp_dim": 2}, "tp_dim=2 is no dimension"),
        ({"runs": ((0, 3),)}, "must lie along tp_dim=None"),
        ({"tp_dim": 0, "runs": ((0, 1), (2, 1))}, "make up local_shape"),
        ({"tp_dim": 0, "runs": ((1, 1), (2, 2))}, "begin at offsets"),
        ({"tp_dim": 0, "offsets": (1, 0), "runs": ((1, 2), (100, 1))}, "lies outside"),
        ({"tp_dim": 0, "tp_partial": True}, "tp_partial=True is for replicated"),
        ({"tie_owner": False}, "needs tie to name the weight"),
    ],
)
def test_contradictions_are_refused(changes, text):
    with pytest.raises(MeshError, match=text):
        _spec((3, 5), **changes)
