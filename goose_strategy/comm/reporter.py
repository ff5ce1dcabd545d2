"""The only thread of the watchdog that talks to the store.

A request to a store whose host is stopped never returns, so nobody else may make one: whoever
wants something from the store hands a function to this thread and waits for it a limited time.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store

from goose_strategy.comm.last_words import Cause, where

_CAUSE = "cause"
_HEARD = "heard"
_REQUEST_S = 2.0
_LINGER_S = 3.0


class Reporter:
    """Publishes this rank's failure and long waits, and reads those of the others.

    Args:
        store: A connection to the store for this thread alone, with a prefix of its own.
        rank: Global rank.
        world_size: Number of ranks.
        on_cause: Called on this thread with the first cause once another rank published one.
        on_lost: Called on this thread when the store no longer answers.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        on_cause: Callable[[Cause], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._on_cause = on_cause
        self._on_lost = on_lost
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._poll_s = 1.0
        self._heard = False
        self._thread = threading.Thread(target=self._run, name="goose-reporter", daemon=True)
        self._thread.start()

    def poll_every(self, seconds: float) -> None:
        """Look for another rank's cause that often; heeded after the wait under way."""
        self._poll_s = seconds

    def publish(self, cause: Cause) -> Cause | None:
        """Publish this rank's cause.

        Returns:
            The first cause that any rank published, or ``None`` if the store did not answer.
        """
        answer: list[Cause] = []

        def put() -> None:
            first = self._store.compare_set(_CAUSE, "", cause.to_json())
            answer.append(Cause.from_json(first))
            self._hear()

        self._ask(put)
        return answer[0] if answer else None

    def publish_wait(self, what: str, stage: int | None, microbatch: int | None) -> None:
        """Publish that this rank has been in one action for long; does not wait."""
        text = json.dumps({"where": where(what, stage, microbatch), "since": time.time()})
        self._requests.put(lambda: self._store.set(f"wait/{self._rank}", text))

    def reports(self) -> list[str]:
        """Say in one line per rank what it last reported; for the moment of a deadline."""
        lines: list[str] = []

        def read() -> None:
            for rank in range(self._world_size):
                key = f"wait/{rank}"
                if not self._store.check([key]):
                    lines.append(f"rank {rank}: no report (stopped, lost, or not in any step)")
                    continue
                told = json.loads(self._store.get(key))
                age = time.time() - told["since"]
                lines.append(f"rank {rank}: {age:.0f} s ago waiting in {told['where']}")

        if not self._ask(read):
            lines.append("the store does not answer: its host (usually rank 0) is stopped or lost")
        return lines

    def linger(self) -> None:
        """Let all ranks hear the first cause before this one ends, as the store may end with it.

        Rank 0 hosts the store where ranks meet over TCP. A rank that was killed will never hear,
        so the wait is short.
        """
        if self._rank != 0:
            return
        count: list[int] = [0]

        def read() -> None:
            count[0] = self._store.add(_HEARD, 0)

        until = time.monotonic() + _LINGER_S
        while count[0] < self._world_size and time.monotonic() < until and self._ask(read):
            time.sleep(0.05)

    def stop(self) -> None:
        """End the thread; one that hangs in the store is left behind (it is a daemon)."""
        self._requests.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(_REQUEST_S)

    def _ask(self, request: Callable[[], None]) -> bool:
        """Have ``request`` run on this thread; return whether it was done in time."""
        done = threading.Event()

        def run() -> None:
            try:
                request()
            finally:
                done.set()

        if threading.current_thread() is self._thread:
            with contextlib.suppress(RuntimeError):
                run()
                return True
            return False
        self._requests.put(run)
        return done.wait(_REQUEST_S)

    def _run(self) -> None:
        # Without a limit a lost host would keep `get` waiting for the store's own 300 s.
        self._store.set_timeout(timedelta(seconds=_REQUEST_S))
        while True:
            try:
                request = self._requests.get(timeout=self._poll_s)
            except queue.Empty:
                request = self._look
            if request is None:
                return
            try:
                request()
            except (RuntimeError, ValueError) as err:
                self._on_lost(str(err).splitlines()[0])
                return

    def _hear(self) -> None:
        """Count this rank among those that know the first cause."""
        if not self._heard:
            self._heard = True
            self._store.add(_HEARD, 1)

    def _look(self) -> None:
        if not self._store.check([_CAUSE]):
            return
        cause = Cause.from_json(self._store.get(_CAUSE))
        self._hear()
        if cause.rank != self._rank:
            self._on_cause(cause)
