"""The reporter: first cause wins, everybody hears it, and a silent store holds nobody up."""

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from goose_strategy.comm.last_words import Cause
from goose_strategy.comm.reporter import Reporter


class _Ranks:
    """Reporters of several ranks over one in-process store."""

    def __init__(self, size, store=None):
        self.store = store if store is not None else dist.HashStore()
        self.causes = {rank: [] for rank in range(size)}
        self.lost = {rank: [] for rank in range(size)}
        self.reporters = [
            Reporter(
                self.store,
                rank=rank,
                world_size=size,
                on_cause=self.causes[rank].append,
                on_lost=self.lost[rank].append,
            )
            for rank in range(size)
        ]
        for reporter in self.reporters:
            reporter.poll_every(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for reporter in self.reporters:
            reporter.stop()


def _cause(rank):
    return Cause(rank=rank, place=f"rank {rank}", what="step", error=f"error {rank}")


def _until(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_first_cause_wins_and_the_others_hear_it():
    with _Ranks(3) as ranks:
        assert ranks.reporters[1].publish(_cause(1)) == _cause(1)
        assert ranks.reporters[2].publish(_cause(2)) == _cause(1)
        _until(lambda: ranks.causes[0])
        assert ranks.causes[0][0] == _cause(1)
        assert ranks.causes[1] == []


def test_rank_0_lingers_until_all_have_heard():
    with _Ranks(2) as ranks:
        ranks.reporters[1].poll_every(0.3)
        ranks.reporters[0].publish(_cause(0))
        ranks.reporters[0].linger()
        assert ranks.causes[1] == [] or ranks.causes[1][0] == _cause(0)
        _until(lambda: ranks.causes[1])


def test_rank_0_does_not_linger_for_long():
    with _Ranks(1) as ranks:
        ranks.reporters[0]._world_size = 2  # another one that is dead
        ranks.reporters[0].publish(_cause(0))
        begin = time.monotonic()
        ranks.reporters[0].linger()
        assert 2.5 < time.monotonic() - begin < 6


def test_waits_are_reported():
    with _Ranks(3) as ranks:
        ranks.reporters[2].publish_wait("forward", 1, 4)
        _until(lambda: ranks.store.check(["wait/2"]))
        lines = ranks.reporters[0].reports()
    assert lines[:2] == [
        f"rank {rank}: no report (stopped, lost, or not in any step)" for rank in (0, 1)
    ]
    assert lines[2] == "rank 2: 0 s ago waiting in 'forward' (stage 1, microbatch 4)"


class _StoppedStore(dist.HashStore):
    """A store whose host is stopped: requests do not return until it is let go."""

    def __init__(self):
        super().__init__()
        self.let_go = threading.Event()

    def compare_set(self, *_):
        self.let_go.wait(20)
        raise RuntimeError("store is gone")

    def set_timeout(self, _timeout: timedelta):
        pass


def test_a_stopped_store_holds_nobody_up():
    store = _StoppedStore()
    with _Ranks(1, store) as ranks:
        begin = time.monotonic()
        assert ranks.reporters[0].publish(_cause(0)) is None
        (line,) = ranks.reporters[0].reports()
        assert line.startswith("the store does not answer")
        assert time.monotonic() - begin < 8
        store.let_go.set()
        _until(lambda: ranks.lost[0])
        assert ranks.lost[0] == ["store is gone"]
