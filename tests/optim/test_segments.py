"""Cutting a slice where histories differ, and putting states back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from goose_strategy.data_parallel.bucket import Bucket
from goose_strategy.data_parallel.plan import BucketKey, Entry, plan_buckets
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.optim.segments import Shard

NAMES = "abcd"
SIZES = {"a": 100, "b": 3000, "c": 64, "d": 500}


def _shard(*, dp_rank: int = 0, dp: int = 1, dtype: torch.dtype = torch.float32) -> Shard:
    params = {n: nn.Parameter(torch.randn(size).to(dtype)) for n, size in SIZES.items()}
    entries = [Entry(name, size, BucketKey(dtype=dtype)) for name, size in SIZES.items()]
    (layout,) = plan_buckets(reversed(entries), dp_size=dp, bucket_numel=10**6)
    mesh = ParallelMesh(MeshLayout(tp=1, pp=1, dp=dp), rank=dp_rank, device=torch.device("cpu"))
    shard = Shard(Bucket(layout, params, mesh, average=False))
    _give(shard, NAMES)
    return shard


def _give(shard: Shard, names: str) -> None:
    """Let these parameters have a gradient, and no others."""
    for slot in shard.bucket.slots:
        slot.param.grad = slot.view if slot.name in names else None


def _names(segments: list) -> list[str]:
    return ["".join(piece.slot.name for piece in segment.pieces) for segment in segments]


def test_a_slice_is_one_segment_with_its_padding() -> None:
    shard = _shard()
    (segment,) = shard.active({})
    assert _names([segment]) == ["abcd"]
    assert segment.weight.numel() == shard.main.numel() == 4096
    assert segment.weight.data_ptr() == shard.bucket.own_weights.data_ptr()
    assert segment.grad.data_ptr() == shard.bucket.grads.own.data_ptr()


def test_pieces_are_the_parts_of_parameters_in_the_slice() -> None:
    first, second = (_shard(dp_rank=rank, dp=2) for rank in (0, 1))
    parts = [(p.slot.name, *p.within_param(s.bucket)) for s in (first, second) for p in s.pieces]
    assert parts == [
        ("a", 0, 100),
        ("b", 0, 1920),
        ("b", 1920, 3000),
        ("c", 0, 64),
        ("d", 0, 500),
    ]


def test_a_slice_of_padding_has_nothing_to_step() -> None:
    shard = _shard(dp_rank=3, dp=4)
    assert shard.pieces == []
    assert shard.active({}) == []
    assert shard.main.numel() == 2048


def test_a_slice_is_cut_around_parameters_without_a_gradient() -> None:
    shard = _shard()
    states: dict = {}
    (whole,) = shard.active(states)
    numbers = torch.arange(4096.0)
    states[whole.weight] = {"step": torch.tensor(3.0), "exp_avg": numbers}
    _give(shard, "acd")
    active = shard.active(states)
    assert _names(active) == ["a", "cd"]
    assert _names(shard.segments) == ["a", "b", "cd"]
    assert whole.weight not in states
    assert [(s.start, s.stop) for s in shard.segments] == [(0, 128), (128, 3136), (3136, 4096)]
    for segment in shard.segments:
        state = states[segment.weight]
        assert torch.equal(state["exp_avg"], numbers[segment.start : segment.stop])
        state["step"] += segment.start
    steps = [states[segment.weight]["step"].item() for segment in shard.segments]
    assert steps == [3.0, 131.0, 3139.0], "each has a step count of its own"


def test_cuts_stay_and_are_refined() -> None:
    shard = _shard()
    _give(shard, "ab")
    assert _names(shard.active({})) == ["ab"]
    _give(shard, "abcd")
    assert _names(shard.active({})) == ["ab", "cd"]
    _give(shard, "bc")
    assert _names(shard.active({})) == ["b", "c"]
    _give(shard, "")
    assert shard.active({}) == []


def test_install_joins_equal_states_and_keeps_others_apart() -> None:
    shard = _shard()
    states: dict = {}
    found = {
        name: {"step": torch.tensor(float(step)), "exp_avg": torch.full((SIZES[name],), step * 1.0)}
        for name, step in (("a", 5), ("b", 5), ("d", 2))
    }
    shard.install(found, states)
    assert _names(shard.segments) == ["ab", "c", "d"]
    first, second, third = shard.segments
    assert second.weight not in states
    assert states[first.weight]["step"] == 5
    assert states[third.weight]["exp_avg"].numel() == third.weight.numel()
    back = {piece.slot.name: state for piece, state in shard.states_by_piece(states)}
    assert back.keys() == found.keys()
    for name, state in found.items():
        assert torch.equal(back[name]["exp_avg"], state["exp_avg"])
        assert back[name]["step"] == state["step"]
    state = states[first.weight]
    assert state["exp_avg"][100:128].count_nonzero() == 0, "nothing between parameters"
    assert state["step"] is not found["a"]["step"], "states are copies"


def test_install_replaces_what_was_there() -> None:
    shard = _shard()
    states = {shard.segments[0].weight: {"step": torch.tensor(1.0)}}
    shard.install({}, states)
    assert states == {}
    assert _names(shard.segments) == ["abcd"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_main_weights_are_rebuilt_where_the_weight_was_written(dtype: torch.dtype) -> None:
    shard = _shard(dtype=dtype)
    assert shard.separate
    assert shard.main.dtype == torch.float32
    shard.main *= 1 + 1e-5
    assert not shard.differs()
    kept = shard.main.clone()
    shard.bucket.slots[1].param.data[7] = 3.5
    assert shard.differs()
    shard.rebuild_main()
    assert not shard.differs()
    assert shard.main[128 + 7] == 3.5
    kept[128 + 7] = 3.5
    assert torch.equal(shard.main, kept), "the low bits of all others stay"


def test_weights_that_are_not_a_number_are_no_difference_for_ever() -> None:
    shard = _shard(dtype=torch.bfloat16)
    shard.bucket.slots[0].param.data[0] = float("nan")
    assert not shard.differs()
    shard.main[0] = float("nan")
    shard.publish()
    assert not shard.differs()


def test_main_weights_are_published_rounded() -> None:
    shard = _shard(dtype=torch.bfloat16)
    shard.main += 0.125
    shard.publish()
    assert not shard.differs()
    wide = _shard()
    assert not wide.separate
    assert wide.main.data_ptr() == wide.bucket.weights.data_ptr()
