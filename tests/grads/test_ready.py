"""The order in which complete buckets start."""

from __future__ import annotations

import pytest

from goose_strategy.grads.ready import ReadyCounter


class _Counter:
    def __init__(self, *sizes: int | None, idle: tuple[int, ...] = ()) -> None:
        self.launched: list[int] = []
        self.idle = set(idle)
        self.ready = ReadyCounter(
            sizes, launch=self.launched.append, idle=self.idle.__contains__
        )  # fmt: skip

    def mark(self, *buckets: int) -> list[int]:
        for bucket in buckets:
            self.ready.mark(bucket)
        return self.launched


def test_a_bucket_starts_when_its_last_parameter_is_ready() -> None:
    counter = _Counter(2, 1)
    assert counter.mark(0) == []
    assert counter.mark(0) == [0]
    assert counter.mark(1) == [0, 1]


def test_buckets_start_in_index_order_only() -> None:
    counter = _Counter(1, 1, 1)
    assert counter.mark(2, 1) == []
    assert counter.mark(0) == [0, 1, 2]


def test_flush_starts_the_rest_once() -> None:
    counter = _Counter(1, 2, 1)
    counter.mark(0, 1)
    counter.ready.flush()
    assert counter.launched == [0, 1, 2]
    counter.ready.flush()
    assert counter.launched == [0, 1, 2]


def test_late_buckets_wait_for_the_flush() -> None:
    counter = _Counter(1, None, 1)
    assert counter.mark(0, 2) == [0]
    counter.ready.flush()
    assert counter.launched == [0, 1, 2]


def test_idle_buckets_are_passed_over() -> None:
    counter = _Counter(1, 3, 1, idle=(1,))
    assert counter.mark(0, 2) == [0, 2]
    counter.ready.flush()
    assert counter.launched == [0, 2]


def test_a_bucket_that_has_begun_is_not_idle() -> None:
    counter = _Counter(1, 2, 1)
    counter.mark(0, 1, 2)
    counter.idle.add(1)
    counter.ready._advance()
    assert counter.launched == [0]


def test_a_round_forgets_the_one_before() -> None:
    counter = _Counter(2)
    counter.mark(0)
    before = counter.ready.round
    counter.ready.dirty = True
    counter.ready.begin_round()
    assert counter.ready.round == before + 1
    assert not counter.ready.dirty
    assert counter.mark(0) == []
    assert counter.mark(0) == [0]


def test_a_launch_that_raises_is_not_repeated() -> None:
    def launch(index: int) -> None:
        seen.append(index)
        raise OSError("no network")

    seen: list[int] = []
    ready = ReadyCounter([1], launch=launch, idle=lambda _: False)
    with pytest.raises(OSError, match="no network"):
        ready.mark(0)
    ready.flush()
    assert seen == [0]
