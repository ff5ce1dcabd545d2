"""Plans of buckets: order, sizes, and what may share one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from goose_strategy.data_parallel.plan import (
    ALIGNMENT,
    SLICE_MULTIPLE,
    BucketKey,
    Entry,
    plan_buckets,
    plan_entries,
)
from goose_strategy.errors import ConfigError
from goose_strategy.mesh.shard import ShardSpec

KEY = BucketKey(dtype=torch.float32)


def _names(buckets: list) -> list[list[str]]:
    return [[entry.name for entry in bucket.entries] for bucket in buckets]


def test_order_is_that_of_the_backward_and_buckets_are_capped() -> None:
    entries = [Entry(name, 400, KEY) for name in "abcde"]
    buckets = plan_buckets(entries, dp_size=2, bucket_numel=1000)
    assert _names(buckets) == [["e", "d"], ["c", "b"], ["a"]]


def test_a_parameter_above_the_cap_is_alone() -> None:
    entries = [Entry("small", 10, KEY), Entry("large", 5000, KEY), Entry("last", 10, KEY)]
    assert _names(plan_buckets(entries, dp_size=1, bucket_numel=1000)) == [
        ["last"],
        ["large"],
        ["small"],
    ]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
def test_places_are_aligned_disjoint_and_padded(dp_size: int) -> None:
    numels = [1, 63, 64, 65, 1000, 7]
    entries = [Entry(str(i), numel, KEY) for i, numel in enumerate(numels)]
    (bucket,) = plan_buckets(entries, dp_size=dp_size, bucket_numel=10**6)
    ends = [start + e.numel for start, e in zip(bucket.starts, bucket.entries, strict=True)]
    assert all(start % ALIGNMENT == 0 for start in bucket.starts)
    assert all(end <= start for end, start in zip(ends, bucket.starts[1:], strict=False))
    assert ends[-1] <= bucket.size
    assert bucket.size % (dp_size * SLICE_MULTIPLE) == 0
    assert bucket.size - ends[-1] < dp_size * SLICE_MULTIPLE + ALIGNMENT


def test_buckets_close_in_the_order_in_which_the_backward_completes_them() -> None:
    decayed = BucketKey(dtype=torch.float32, optimizer=0, group=0)
    plain = BucketKey(dtype=torch.float32, optimizer=0, group=1)
    entries = [
        Entry(f"{layer}.{kind}", 600, decayed if kind == "weight" else plain)
        for layer in range(3)
        for kind in ("weight", "bias")
    ]
    buckets = plan_buckets(entries, dp_size=1, bucket_numel=1300)
    assert _names(buckets) == [
        ["2.bias", "1.bias"],
        ["2.weight", "1.weight"],
        ["0.bias"],
        ["0.weight"],
    ]


def test_what_needs_another_communicator_comes_last_and_ties_after_it() -> None:
    keys = {
        "tie": BucketKey(dtype=torch.float32, tie="embed"),
        "partial": BucketKey(dtype=torch.float32, tp_replicated=True, tp_partial=True),
        "plain": KEY,
        "half": BucketKey(dtype=torch.bfloat16),
    }
    entries = [Entry(name, 8, key) for name, key in keys.items()]
    buckets = plan_buckets(reversed(entries), dp_size=1, bucket_numel=100)
    assert _names(buckets) == [["plain"], ["half"], ["partial"], ["tie"]]


def test_stages_come_from_last_to_first_and_what_they_share_after_them() -> None:
    stage_of = {"a": 1, "b": 1, "c": 3, "d": 3, "p": 3}
    params = [(name, nn.Parameter(torch.zeros(8))) for name in "abscdp"]
    specs = {"p": _spec("p", tp_partial=True)}
    entries = plan_entries(params, specs, {}, tp_size=2, stage_of=stage_of)
    assert [e.key.stage for e in entries] == [1, 1, None, 3, 3, 3]
    assert [e.key.shared for e in entries] == [False, False, True, False, False, False]
    buckets = plan_buckets(entries, dp_size=1, bucket_numel=10**6)
    assert _names(buckets) == [["d", "c"], ["b", "a"], ["p"], ["s"]]
    assert [bucket.key.late for bucket in buckets] == [False, False, True, True]
    # A bucket that closes later comes before one of a stage that is done later.
    small = plan_buckets(entries, dp_size=1, bucket_numel=8)
    assert _names(small) == [["d"], ["c"], ["b"], ["a"], ["p"], ["s"]]


@pytest.mark.parametrize("stage_of", [None, {}])
def test_stages_need_not_be_told_apart(stage_of: dict[str, int] | None) -> None:
    params = [(name, nn.Parameter(torch.zeros(8))) for name in "ab"]
    for entry in plan_entries(params, {}, {}, tp_size=1, stage_of=stage_of):
        assert entry.key == KEY
        assert not entry.key.late


def _spec(name: str, **kwargs: object) -> ShardSpec:
    box = {"global_shape": (4,), "offsets": (0,), "local_shape": (4,), "dtype": torch.float32}
    return ShardSpec(name=name, **box, **kwargs)


def test_keys_come_from_specs_and_owners() -> None:
    names = ["cut", "copy", "partial", "tied", "unknown"]
    params = [(name, nn.Parameter(torch.zeros(4))) for name in names]
    specs = {
        "cut": _spec("cut", tp_dim=0),
        "copy": _spec("copy"),
        "partial": _spec("partial", tp_partial=True),
        "tied": _spec("tied", tp_dim=0, tie="embed", tie_owner=False),
    }
    keys = [e.key for e in plan_entries(params, specs, {"cut": (1, 2)}, tp_size=2)]
    f32 = torch.float32
    assert keys == [
        BucketKey(dtype=f32, optimizer=1, group=2),
        BucketKey(dtype=f32, tp_replicated=True),
        BucketKey(dtype=f32, tp_replicated=True, tp_partial=True),
        BucketKey(dtype=f32, tie="embed", tie_owner=False),
        BucketKey(dtype=f32, tp_replicated=True),
    ]
    alone = [e.key for e in plan_entries(params, specs, {}, tp_size=1)]
    assert not any(key.tp_replicated or key.tp_partial for key in alone)


def test_accumulators_are_wide() -> None:
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert BucketKey(dtype=dtype).accumulator_dtype == wide.get(dtype, dtype)


def test_complex_parameters_are_refused() -> None:
    param = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="requires_grad=False"):
        plan_entries([("p", param)], {}, {}, tp_size=1)
