from __future__ import annotations

import pytest
import torch

from goose_strategy.checkpoint.manifest import (
    LocalTensor,
    check_tiling,
    flattened,
    key_of,
    nested,
    overlap,
)
from goose_strategy.errors import CheckpointError
from goose_strategy.mesh.shard import Box


def test_a_piece_must_lie_within_the_tensor() -> None:
    with pytest.raises(CheckpointError, match=r"m\.w: offsets=\(3,\) with lengths=\(2,\) lies"):
        LocalTensor(("m", "w"), (4,), torch.float32, ((Box((3,), (2,)), torch.zeros(2)),))
    with pytest.raises(CheckpointError, match="lies outside"):
        LocalTensor(("m", "w"), (4, 1), torch.float32, ((Box((0,), (2,)), torch.zeros(2)),))


def test_a_piece_must_have_the_shape_of_its_box() -> None:
    with pytest.raises(CheckpointError, match=r"shape=\(3,\) cannot hold a box of lengths=\(2,\)"):
        LocalTensor(("m", "w"), (4,), torch.float32, ((Box((0,), (2,)), torch.zeros(3)),))


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (Box((0, 0), (2, 4)), Box((1, 3), (5, 5)), Box((1, 3), (1, 1))),
        (Box((0, 0), (2, 4)), Box((2, 0), (2, 4)), None),
        (Box((0,), (0,)), Box((0,), (3,)), None),
        (Box((), ()), Box((), ()), Box((), ())),
    ],
)
def test_overlap(one: Box, other: Box, shared: Box | None) -> None:
    assert overlap(one, other) == shared
    assert overlap(other, one) == shared


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((4, 6), [Box((0, 0), (4, 3)), Box((0, 3), (4, 3))]),
        # Three boxes that are elements 2 to 16 of the flattened tensor, and the rest.
        ((4, 6), [Box((0, 2), (1, 4)), Box((1, 0), (1, 6)), Box((2, 0), (1, 4)),
                  Box((0, 0), (1, 2)), Box((2, 4), (1, 2)), Box((3, 0), (1, 6))]),
        ((), [Box((), ())]),
        ((0, 3), []),
    ],
)  # fmt: skip
def test_a_tiling_passes(shape: tuple[int, ...], boxes: list[Box]) -> None:
    check_tiling("k", shape, boxes)


@pytest.mark.parametrize(
    ("shape", "boxes", "said"),
    [
        ((4, 6), [Box((0, 0), (4, 3))], "k: the ranks hold 12 of the 24 elements"),
        ((4,), [Box((0,), (2,)), Box((1,), (3,))], "k: two ranks hold the same elements"),
        # As many elements as the tensor has, but one twice and one never.
        ((4,), [Box((0,), (2,)), Box((1,), (2,))], "two ranks hold the same elements"),
        ((2, 4), [Box((0, 0), (2, 2)), Box((0, 2), (1, 2)), Box((0, 3), (1, 1))], "the same"),
        ((), [Box((), ()), Box((), ())], "two ranks hold the same elements"),
        ((), [], "hold 0 of the 1 elements"),
    ],
)
def test_a_gap_or_an_overlap_is_refused(
    shape: tuple[int, ...], boxes: list[Box], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        check_tiling("k", shape, boxes)


def test_nested_values_are_taken_apart_as_dcp_does() -> None:
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    value = {
        "param_groups": [
            {"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.b", "c"]},
            {"lr": 0.2, "betas": (0.9, 0.99), "params": []},
        ],
        "list": [1, 2],
        "deep": {"x": {"y": [[{"z": None}]]}},
    }
    flat = flattened(("optimizer",), value)
    theirs, paths = flatten_state_dict({"optimizer": value})
    assert {key_of(path): leaf for path, leaf in flat.items()} == theirs
    assert {key_of(path): path for path in flat} == paths
    assert nested(flat) == {"optimizer": value}
