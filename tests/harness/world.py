"""Worlds of ranks for tests: started in a fraction of a second, and honest about what failed.

``run_ranks(fn, 4, ...)`` calls ``fn(ctx, ...)`` on four processes and returns their results. One
world per size lives for the whole pytest session, because starting interpreters that import torch
costs a hundred times more than the tests. torch's ``spawn`` is that slow, and it shows whichever
rank *noticed* a failure; here the earliest error that is not an echo of another rank's is raised.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.harness.worker import (
    PRELOAD,
    ROOT,
    Failure,
    Place,
    Task,
    isolated_rank,
    persistent_rank,
)

# A rank that fails leaves the others waiting: this long they may still tell an earlier cause.
GRACE_S = 1.0
START_S = 50.0

_FORKSERVER = multiprocessing.get_context("forkserver")
_WORLDS: dict[int, World] = {}
_STATE: set[str] = set()
_UNSET = object()


class RankFailure(RuntimeError):
    """A rank failed; the text carries its traceback, what the other ranks said, and its output.

    Attributes:
        rank: The rank that failed first.
        kind: Name of the exception's class, ``"Death"`` or ``"Hang"``.
        traceback: Full text of that rank's traceback (of the stacks, if it hung).
    """

    def __init__(self, message: str, *, rank: int, kind: str, traceback: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.traceback = traceback


@dataclass(frozen=True)
class Death:
    """Result of a rank that was expected to die (or to be stopped).

    Attributes:
        rank: The rank.
        exit_code: As ``multiprocessing`` has it: -9 means killed by SIGKILL.
        output: All it wrote to stdout and stderr.
        after_s: Seconds from the start of the run to its end.
    """

    rank: int
    exit_code: int | None
    output: str
    after_s: float


@dataclass
class _Rank:
    place: Place
    process: BaseProcess
    channel: Connection
    ready: bool = False
    closed: bool = False
    result: Any = _UNSET
    failure: Failure | None = None
    ended_at: float | None = None

    def read(self) -> None:
        """Take what the rank has sent."""
        try:
            while not self.closed and self.channel.poll():
                message = self.channel.recv()
                if message is None:
                    self.ready = True
                elif isinstance(message, Failure):
                    self.failure = message
                else:
                    self.result = pickle.loads(message)
        except (EOFError, ConnectionResetError):
            self.closed = True

    def output(self) -> str:
        return self.place.log.read_text(errors="replace") if self.place.log.exists() else ""


@dataclass
class World:
    """Processes of one world and the loop that watches them.

    Attributes:
        size: Number of ranks.
        isolated: Whether the ranks serve one task only and make their own process group.
        may_die: Ranks whose end is part of the test.
        may_stop: Ranks that the test stops; they are killed once all others have ended.
    """

    size: int
    isolated: bool = False
    may_die: frozenset[int] = frozenset()
    may_stop: frozenset[int] = frozenset()
    ranks: list[_Rank] = field(default_factory=list)
    runs: int = 0

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="goose-world-"))

    def start(self, target: Callable[..., None], *args: object) -> None:
        """Fork the ranks; does not wait for them."""
        warm_up()
        for rank in range(self.size):
            place = Place(rank, self.size, self.folder)
            ours, theirs = _FORKSERVER.Pipe()
            process = _FORKSERVER.Process(target=target, args=(theirs, place, *args))
            process.start()
            theirs.close()
            self.ranks.append(_Rank(place, process, ours))

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> list[Any]:
        """Run one task on every rank; on any failure the world is killed."""
        self.runs += 1
        scratch = self.folder / f"run{self.runs}"
        scratch.mkdir()
        task = _pickled(Task(fn, args, scratch))
        try:
            if self.isolated:
                self.start(isolated_rank, task, _free_port())
            else:
                self._submit(task)
            self._watch(timeout_s, self._finished)
        except BaseException as error:
            if not isinstance(error, RankFailure):
                error.add_note(self.stacks())
            self.kill()
            raise
        self._show_output()
        shutil.rmtree(scratch, ignore_errors=True)
        return [rank.result for rank in self.ranks]

    def _submit(self, task: bytes) -> None:
        if not self.ranks:
            self.start(persistent_rank)
            self._watch(START_S, lambda rank: rank.ready)
        for rank in self.ranks:
            rank.result = _UNSET
            rank.channel.send_bytes(task)

    def _watch(self, timeout_s: float, finished: Callable[[_Rank], bool]) -> None:
        """Wait until every rank has finished; raise the first cause otherwise."""
        begin = time.monotonic()
        deadline = begin + timeout_s
        while pending := [rank for rank in self.ranks if not finished(rank)]:
            if {rank.place.rank for rank in pending} <= self.may_stop:
                _kill(pending)
            left = deadline - time.monotonic()
            if left <= 0 or not self._next_event(pending, left):
                break
            self._note_deaths(begin)
            if self._failures():
                deadline = min(deadline, time.monotonic() + GRACE_S)
        self._raise_first_cause(pending, timeout_s)

    def _finished(self, rank: _Rank) -> bool:
        if not self.isolated:
            return rank.result is not _UNSET or rank.failure is not None
        return rank.ended_at is not None

    def _next_event(self, pending: list[_Rank], left: float) -> bool:
        sources: list[Any] = [rank.channel for rank in pending if not rank.closed]
        sources += [rank.process.sentinel for rank in pending if rank.ended_at is None]
        ready = wait(sources, left)
        for rank in pending:
            rank.read()
        return bool(ready)

    def _note_deaths(self, begin: float) -> None:
        """Turn processes that have ended into a :class:`Death` result or a failure."""
        for rank in self.ranks:
            code = rank.process.exitcode
            if code is None or rank.ended_at is not None:
                continue
            rank.read()
            rank.ended_at = time.monotonic()
            number = rank.place.rank
            if number in self.may_die | self.may_stop and code != 0:
                rank.failure = None
                rank.result = Death(number, code, rank.output(), rank.ended_at - begin)
            elif rank.failure is None and (code != 0 or rank.result is _UNSET):
                text = f"the process of rank {number} ended with exit code {code}"
                rank.failure = Failure(number, rank.ended_at, "Death", text, text)
            elif number in self.may_die:
                text = f"rank {number} was expected to die but returned"
                rank.failure = Failure(number, rank.ended_at, "Survival", text, text)

    def _failures(self) -> list[Failure]:
        """Return the failures that the test did not ask for."""
        found = [rank.failure for rank in self.ranks if rank.failure]
        return [f for f in found if f.rank not in self.may_die or f.kind == "Survival"]

    def _raise_first_cause(self, pending: list[_Rank], timeout_s: float) -> None:
        if failures := self._failures():
            first, *later = sorted(failures, key=lambda failure: (failure.echo, failure.at))
            others = "".join(f"\nrank {f.rank}, later: {f.kind}: {f.message}" for f in later)
            head = f"rank {first.rank} of {self.size} failed: {first.kind}: {first.message}"
            text = f"{head}\n\n{first.text}{others}{self._outputs([first.rank])}"
            raise RankFailure(text, rank=first.rank, kind=first.kind, traceback=first.text)
        if pending:
            names = ", ".join(str(rank.place.rank) for rank in pending)
            head = f"rank {names} of {self.size} did not finish within timeout_s={timeout_s:g}"
            stacks = self.stacks()
            outputs = self._outputs([rank.place.rank for rank in pending])
            hung = pending[0].place.rank
            text = f"{head}\n\n{stacks}{outputs}"
            raise RankFailure(text, rank=hung, kind="Hang", traceback=stacks)

    def stacks(self) -> str:
        """Return the stacks of all threads of all living ranks."""
        asked = [rank for rank in self.ranks if rank.ready and rank.process.is_alive()]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid or 0, signal.SIGUSR1)
        time.sleep(0.3 if asked else 0.0)
        texts = []
        for rank in asked:
            stack = rank.place.stacks.read_text().strip() or "no answer (stopped?)"
            texts.append(f"--- stacks of rank {rank.place.rank} ---\n{stack}\n")
        return "".join(texts)

    def _outputs(self, numbers: list[int], lines: int = 60) -> str:
        texts = []
        for number in numbers:
            tail = "\n".join(self.ranks[number].output().splitlines()[-lines:])
            texts.append(f"\n--- output of rank {number} ---\n{tail}" if tail else "")
        return "".join(texts)

    def _show_output(self) -> None:
        for rank in self.ranks:
            for line in rank.output().splitlines():
                sys.stdout.write(f"[rank {rank.place.rank}] {line}\n")

    def kill(self) -> None:
        """End every process of this world and remove its files."""
        if _WORLDS.get(self.size) is self:
            del _WORLDS[self.size]
        _kill(self.ranks)
        for rank in self.ranks:
            rank.process.join()
            rank.channel.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 50.0,
    isolated: bool = False,
    expect_death: Collection[int] = (),
    expect_stopped: Collection[int] = (),
) -> list[Any]:
    """Call ``fn(ctx, *args)`` on every rank of a world and return the results in rank order.

    Args:
        fn: A top-level function of an importable module; ``ctx`` is a ``worker.Context``.
        world_size: Number of ranks.
        *args: Picklable arguments, equal on all ranks.
        timeout_s: Seconds until the ranks count as hung; below pytest-timeout's 60, so that the
            error with the stacks of all ranks comes first.
        isolated: New processes without a process group, in the environment that ``torchrun``
            sets, for tests that start Lightning or kill ranks. Otherwise the ranks persist and
            the default process group (gloo) exists.
        expect_death: Ranks that must end with an error or a signal; their result is a `Death`.
        expect_stopped: Ranks that stop (SIGSTOP); killed, and a `Death`, when all others ended.

    Returns:
        One result per rank.

    Raises:
        RankFailure: If a rank raised, died, or hung.
    """
    if not isolated:
        if expect_death or expect_stopped:
            raise ValueError("expect_death and expect_stopped need isolated=True")
        world = _WORLDS.get(world_size)
        if world is None:
            world = _WORLDS[world_size] = World(world_size)
        return world.run(fn, args, timeout_s)
    world = World(
        world_size,
        isolated=True,
        may_die=frozenset(expect_death),
        may_stop=frozenset(expect_stopped),
    )
    try:
        return world.run(fn, args, timeout_s)
    finally:
        world.kill()


def warm_up() -> None:
    """Start the forkserver and wait until it has imported everything (once per session)."""
    if "warm" in _STATE:
        return
    _FORKSERVER.set_forkserver_preload([PRELOAD])
    with _environment():
        multiprocessing.forkserver.ensure_running()
    process = _FORKSERVER.Process(target=time.monotonic)
    process.start()
    process.join()
    _STATE.add("warm")


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Give the forkserver, and so all ranks, one thread and no network."""
    saved = dict(os.environ)
    paths = [str(ROOT), *filter(None, [saved.get("PYTHONPATH")])]
    os.environ.update(
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONPATH=os.pathsep.join(paths),
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


def _pickled(task: Task) -> bytes:
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"fn={task.fn!r} must be a top-level function, with picklable args"
        ) from error


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def _kill(ranks: list[_Rank]) -> None:
    """Kill ranks together with the processes they started."""
    for rank in ranks:
        pid = rank.process.pid
        if pid is None:
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            rank.process.kill()


def close_worlds() -> None:
    """End all worlds; pytest calls this last."""
    for world in list(_WORLDS.values()):
        world.kill()


atexit.register(close_worlds)
