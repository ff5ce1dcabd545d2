"""Ends all ranks soon after one of them failed, was lost or stopped, and says which and why.

A rank that leaves a schedule half way leaves its peers waiting. torch's own watchdog knows NCCL
only, covers one collective at a time, and names neither the stage nor the first cause; gloo says
"connection closed by peer". Here every rank runs a small watchdog beside the training thread, and
the store through which the ranks met carries the first cause: it works while a collective hangs.

Two threads: the reporter talks to the store (a request to a stopped host never returns), the timer
only looks at the clock, so it can always end the process. Nothing is watched outside of
`Watchdog.guard`: user code may take as long as it likes there, and an error that every rank raises
before it enters the guard (a bad batch) ends nobody.
"""

from __future__ import annotations

import atexit
import threading
import time
import traceback
from types import TracebackType
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore, Store

from goose_strategy.comm.last_words import Cause, end_process, error_line, where
from goose_strategy.comm.reporter import Reporter
from goose_strategy.compat.torch import clone_store, default_store
from goose_strategy.errors import GooseError, PeerError
from goose_strategy.validate import positive

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh

_POLL_S = 0.5
_IDLE_POLL_S = 5.0
_GRACE_S = 5.0
_TELL_S = 5.0
_LOST = ("connection", "timed out", "timeout", "broken pipe", "peer", "socket")


class _Guard:
    """One guarded section of the training thread."""

    __slots__ = ("microbatch", "stage", "watchdog", "what")

    def __init__(
        self, watchdog: Watchdog, what: str, stage: int | None, microbatch: int | None
    ) -> None:
        self.watchdog = watchdog
        self.what = what
        self.stage = stage
        self.microbatch = microbatch

    def __enter__(self) -> None:
        self.watchdog.enter(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.watchdog.leave(self)
        else:
            self.watchdog.leave_failed(self, error)


class Watchdog:
    """Watches the guarded sections of this rank and the failures of all others.

    In a world of one rank it does nothing.

    Args:
        mesh: Names the ranks.
        store: The ranks' store; that of the default process group if ``None``.
        first_step_timeout_s: Seconds without progress after which the ranks end, in the first
            section of each name (which may compile, allocate and open connections).
        step_timeout_s: The same for all further sections.

    Raises:
        ConfigError: If a timeout is not greater than 0.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        *,
        store: Store | None = None,
        first_step_timeout_s: float = 300.0,
        step_timeout_s: float = 100.0,
    ) -> None:
        positive(first_step_timeout_s=first_step_timeout_s, step_timeout_s=step_timeout_s)
        self._mesh = mesh
        self._first_timeout_s = first_step_timeout_s
        self._timeout_s = step_timeout_s
        self._open: list[_Guard] = []
        self._pulse: tuple[_Guard, float, float] | None = None
        self._seen: set[str] = set()
        self._cause: Cause | None = None
        self._failed_at: float | None = None
        self._lost: tuple[str, float] | None = None
        self._stopped = threading.Event()
        self._ending = threading.Lock()
        self._reporter: Reporter | None = None
        self._timer: threading.Thread | None = None
        if mesh.layout.world_size > 1:
            self._start(store if store is not None else default_store())

    def _start(self, store: Store) -> None:
        mine = clone_store(store)
        # Each rank makes its watchdogs in the same order, so that the count names the same one.
        life = mine.add(f"goose/watchdog/{self._mesh.rank}", 1)
        self._reporter = Reporter(
            PrefixStore(f"goose/watchdog/life{life}", mine),
            rank=self._mesh.rank,
            world_size=self._mesh.layout.world_size,
            on_cause=self._peer_failed,
            on_lost=self._store_lost,
        )
        self._timer = threading.Thread(target=self._watch, name="goose-watchdog", daemon=True)
        self._timer.start()
        # A daemon thread inside the store while the interpreter is torn down would abort it.
        atexit.register(self.stop)

    def guard(
        self, what: str, *, stage: int | None = None, microbatch: int | None = None
    ) -> _Guard:
        """Watch a section in which other ranks depend on this one.

        Sections nest; entering and leaving one is progress. An exception that leaves a section is
        published as this rank's failure (see `fail`), with a note that names the place.

        Args:
            what: What happens, e.g. ``"forward"``.
            stage: Pipeline stage concerned.
            microbatch: Microbatch concerned.

        Returns:
            A context manager. It raises `PeerError` where the section ended because another rank
            failed or was lost.
        """
        return _Guard(self, what, stage, microbatch)

    def enter(self, guard: _Guard) -> None:
        """Note that a section begins; called by the section."""
        now = time.monotonic()
        self._open.append(guard)
        limit = self._timeout_s if self._open[0].what in self._seen else self._first_timeout_s
        self._pulse = (guard, now, limit)
        if self._reporter is not None and len(self._open) == 1:
            self._reporter.poll_every(_POLL_S)

    def leave(self, guard: _Guard) -> None:
        """Note that a section ended well; called by the section."""
        self._open.remove(guard)
        if self._open and self._pulse is not None:
            self._pulse = (self._open[-1], time.monotonic(), self._pulse[2])
            return
        self._seen.add(guard.what)
        self._pulse = None
        if self._reporter is not None:
            self._reporter.poll_every(_IDLE_POLL_S)

    def leave_failed(self, guard: _Guard, error: BaseException) -> None:
        """Publish the exception that leaves a section; called by the section.

        Raises:
            PeerError: If the exception is only the echo of another rank's failure.
        """
        place = where(guard.what, guard.stage, guard.microbatch)
        first = self._failed_at is None
        cause = self.fail(error)
        self._open.remove(guard)
        if not self._open:
            self._pulse = None
        if not first or self._reporter is None:
            return
        error.add_note(f"goose-strategy: on {self._mesh.describe()} in {place}.")
        if cause.rank != self._mesh.rank:
            raise self._peer_error(cause) from error
        if not isinstance(error, PeerError) and _looks_lost(error):
            raise PeerError(
                f"{self._mesh.describe()} lost a peer in {place}: {error_line(error)}",
                rank=self._mesh.rank,
                stage=guard.stage,
                microbatch=guard.microbatch,
            ) from error

    def fail(
        self, error: BaseException, *, stage: int | None = None, microbatch: int | None = None
    ) -> Cause:
        """Publish this rank's failure, so that all ranks end.

        This rank may unwind for a few seconds (callbacks, ``finally``), then it is ended too.

        Args:
            error: What was raised.
            stage: Pipeline stage concerned; the innermost section's if ``None``.
            microbatch: Microbatch concerned; the innermost section's if ``None``.

        Returns:
            The first cause: this one, or that of another rank which was earlier.
        """
        mine = self._cause_of(error, stage, microbatch)
        if self._failed_at is not None or self._reporter is None:
            return self._cause or mine
        self._failed_at = time.monotonic()
        self._cause = self._cause or self._reporter.publish(mine) or mine
        self._reporter.linger()
        return self._cause

    def check(self) -> None:
        """Raise early if another rank failed, instead of waiting for it.

        Raises:
            PeerError: If another rank failed; the message carries its cause.
        """
        cause = self._cause
        if cause is not None and cause.rank != self._mesh.rank:
            raise self._peer_error(cause)

    def stop(self) -> None:
        """End the watching; idempotent. Call it before the process groups are destroyed."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        atexit.unregister(self.stop)
        if self._reporter is not None:
            self._reporter.stop()
        if self._timer is not None and threading.current_thread() is not self._timer:
            self._timer.join()

    def _cause_of(self, error: BaseException, stage: int | None, microbatch: int | None) -> Cause:
        guard = self._open[-1] if self._open else None
        if isinstance(error, GooseError):
            stage = error.stage if stage is None else stage
            microbatch = error.microbatch if microbatch is None else microbatch
        if guard is not None:
            stage = guard.stage if stage is None else stage
            microbatch = guard.microbatch if microbatch is None else microbatch
        return Cause(
            rank=self._mesh.rank,
            place=self._mesh.describe(),
            what=guard.what if guard is not None else "user code",
            stage=stage,
            microbatch=microbatch,
            error=error_line(error),
            details="".join(traceback.format_exception(error)),
        )

    def _peer_error(self, cause: Cause) -> PeerError:
        error = PeerError(f"another rank failed first: {cause.describe()}")
        if cause.details:
            error.add_note(f"The traceback of rank {cause.rank}:\n{cause.details}")
        return error

    def _peer_failed(self, cause: Cause) -> None:
        """Another rank published a cause. Runs on the reporter's thread."""
        if self._cause is None:
            self._cause = cause
        # A rank that failed too is unwinding and says why; the timer ends it.
        if self._failed_at is None:
            self._end(cause, "another rank failed")

    def _store_lost(self, reason: str) -> None:
        """The store is gone: normal at the end of a run. Runs on the reporter's thread."""
        self._lost = (reason, time.monotonic())

    def _watch(self) -> None:
        """Look at the clock until stopped. Runs on the timer's thread."""
        tick = min(_POLL_S, self._timeout_s / 10, self._first_timeout_s / 10)
        told: _Guard | None = None
        while not self._stopped.wait(tick):
            now = time.monotonic()
            if self._failed_at is not None:
                if now - self._failed_at > _GRACE_S and self._cause is not None:
                    self._end(self._cause, f"still there {_GRACE_S:.0f} s after a failure")
                continue
            if self._pulse is None:
                continue
            guard, since, limit = self._pulse
            if now - since > limit:
                self._expire(guard, limit)
            elif self._lost is not None and now - max(self._lost[1], since) > _GRACE_S:
                self._end(self._lost_cause(guard, self._lost[0]), "the store is gone")
            elif guard is not told and now - since > min(_TELL_S, limit / 4):
                told = guard
                if self._reporter is not None:
                    self._reporter.publish_wait(guard.what, guard.stage, guard.microbatch)

    def _expire(self, guard: _Guard, limit: float) -> None:
        mine = self._observed(guard, f"no progress for {limit:g} s")
        reports: list[str] = []
        if self._reporter is not None:
            mine = self._reporter.publish(mine) or mine
            reports = self._reporter.reports()
        self._end(mine, f"deadline of {limit:g} s expired here", reports)

    def _lost_cause(self, guard: _Guard, reason: str) -> Cause:
        return self._observed(
            guard, f"the host of the store (usually rank 0) is gone while this rank waits: {reason}"
        )

    def _observed(self, guard: _Guard, error: str) -> Cause:
        return Cause(
            rank=self._mesh.rank,
            place=self._mesh.describe(),
            what=guard.what,
            stage=guard.stage,
            microbatch=guard.microbatch,
            error=error,
        )

    def _end(self, cause: Cause, why: str, reports: list[str] | None = None) -> None:
        if self._stopped.is_set() or not self._ending.acquire(blocking=False):
            return
        pulse = self._pulse
        here = where(pulse[0].what, pulse[0].stage, pulse[0].microbatch) if pulse else "user code"
        lines = [
            f"goose-strategy: {self._mesh.describe()} ends in {here}: {why}.",
            f"goose-strategy: first cause: {cause.describe()}",
            *(f"goose-strategy: {line}" for line in reports or ()),
        ]
        if self._reporter is not None:
            self._reporter.linger()
        if cause.rank != self._mesh.rank or self._failed_at is None:
            lines += [line for line in cause.details.splitlines() if line]
        end_process(lines, stacks=True)


def _looks_lost(error: BaseException) -> bool:
    """Whether a backend's error says that the other side is gone or silent."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in text for part in _LOST)
