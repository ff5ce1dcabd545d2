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


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_of_every_range_hold_its_elements_in_order(shape):
    spec = _spec(shape)
    whole = torch.arange(math.prod(spec.global_shape)).view(spec.global_shape)
    local = whole[tuple(slice(o, o + n) for o, n in zip(spec.offsets, shape, strict=True))]
    flat = local.reshape(-1)
    for start, stop in itertools.combinations_with_replacement(range(spec.numel + 1), 2):
        boxes = spec.flat_range_boxes(start, stop)
        parts = [
            whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].reshape(-1)
            for box in boxes
        ]
        found = torch.cat(parts) if parts else flat[:0]
        assert torch.equal(found, flat[start:stop]), (start, stop)
        assert sum(box.numel for box in boxes) == stop - start
        assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_a_matrix_range_is_head_body_tail():
    spec = _spec((4, 10), offsets=(100, 0), global_shape=(200, 10))
    assert spec.flat_range_boxes(7, 34) == [
        Box((100, 7), (1, 3)),
        Box((101, 0), (2, 10)),
        Box((103, 0), (1, 4)),
    ]
    assert spec.flat_range_boxes(0, 40) == [spec.box]
    assert spec.flat_range_boxes(12, 15) == [Box((101, 2), (1, 3))]


def test_ranges_outside_are_refused():
    for start, stop in ((-1, 2), (3, 2), (0, 8)):
        with pytest.raises(MeshError, match=f"start={start}, stop={stop}"):
            _spec((7,)).flat_range_boxes(start, stop)


def test_replicated_describes_a_whole_tensor():
    spec = ShardSpec.replicated("norm.weight", torch.zeros(5, 2, dtype=torch.float64))
    assert spec.box == Box((0, 0), (5, 2))
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
        ({"tp_dim": 0, "tp_partial": True}, "tp_partial=True is for replicated"),
        ({"tie_owner": False}, "needs tie to name the weight"),
    ],
)
def test_contradictions_are_refused(changes, text):
    with pytest.raises(MeshError, match=text):
        _spec((3, 5), **changes)
