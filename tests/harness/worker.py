"""What runs inside a rank: set-up, one task after another, and the report of what went wrong.

torch's own ``MultiProcessTestCase`` starts new interpreters for every test and reports the rank
that *noticed* a failure first. Here a rank reports its traceback with the time at which it was
raised and whether it looks like the echo of another rank's failure; ``world.py`` chooses.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = "tests.harness.preload"

# Messages of the transports when the *other* side went away, and of waits that ran out.
_ECHO = re.compile(
    r"connection (closed|reset|refused|was (likely )?closed)|broken pipe|socket (closed|error)"
    r"|pair closure|timed? ?out waiting|wait timeout|failed to (recv|send)|recvvalue|sendbytes"
    r"|remote process exited",
    re.IGNORECASE,
)
_ECHO_CLASSES = ("PeerError", "DistNetworkError", "DistBackendError", "DistStoreError")


@dataclass(frozen=True)
class Place:
    """Where a rank lives: its number, its world and the files it writes."""

    rank: int
    world_size: int
    folder: Path

    @property
    def log(self) -> Path:
        """File that receives the rank's stdout and stderr."""
        return self.folder / f"rank{self.rank}.log"

    @property
    def stacks(self) -> Path:
        """File that receives the rank's stacks on SIGUSR1."""
        return self.folder / f"rank{self.rank}.stacks"


@dataclass(frozen=True)
class Context:
    """What a test function running in a rank is given first.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        tmp_path: An empty folder, the same on all ranks, removed after the run.
    """

    rank: int
    world_size: int
    tmp_path: Path


@dataclass(frozen=True)
class Failure:
    """An error of one rank, as text, with the time at which it was caught."""

    rank: int
    at: float
    kind: str
    message: str
    text: str
    echo: bool = False


@dataclass(frozen=True)
class Task:
    """One call of a test function."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    tmp_path: Path


@dataclass
class _Background:
    """Errors that no caller would see: of threads, and of ``__del__`` methods."""

    errors: list[BaseException] = field(default_factory=list)

    def in_thread(self, hook: threading.ExceptHookArgs) -> None:
        if hook.exc_value is not None:
            self.errors.append(hook.exc_value)

    def unraisable(self, hook: Any) -> None:
        if hook.exc_value is not None:
            self.errors.append(hook.exc_value)

    def check(self) -> None:
        gc.collect()
        errors, self.errors = self.errors, []
        if errors:
            raise RuntimeError("an error was raised in the background") from errors[0]


def warning_filters() -> list[str]:
    """Return pytest's ``filterwarnings`` of pyproject.toml, the one list there is."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    filters: list[str] = settings["tool"]["pytest"]["ini_options"]["filterwarnings"]
    return filters


@functools.cache
def _parsed_filters() -> tuple[tuple[str, str, type[Warning]], ...]:
    parsed = []
    for line in warning_filters():
        action, message, category = ([*line.split(":"), "", ""])[:3]
        module, _, name = category.strip().rpartition(".")
        found = getattr(importlib.import_module(module or "builtins"), name or "Warning")
        parsed.append((action.strip(), message.strip(), found))
    return tuple(parsed)


@contextlib.contextmanager
def strict_warnings() -> Iterator[None]:
    """Apply the project's warning filters, the last line first as pytest does."""
    filters = _parsed_filters()
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category in filters:
            warnings.filterwarnings(action, message, category)  # type: ignore[arg-type]
        yield


def describe(rank: int, error: BaseException) -> Failure:
    """Turn a caught exception into a picklable :class:`Failure`."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    echo = any(
        isinstance(link, ConnectionError)
        or type(link).__name__ in _ECHO_CLASSES
        or (isinstance(link, RuntimeError) and _ECHO.search(str(link)) is not None)
        for link in chain
    )
    text = "".join(traceback.format_exception(error))
    return Failure(rank, time.monotonic(), type(error).__name__, str(error), text, echo)


def enter_rank(place: Place) -> None:
    """Prepare this process: own process group, one thread, output to files, stacks on demand."""
    os.setpgid(0, 0)
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
        os.dup2(log, descriptor)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=place.stacks.open("w"), all_threads=True)
    watch = threading.Thread(target=_end_with_parent, name="harness-parent-watch", daemon=True)
    watch.start()
    torch.set_num_threads(1)
    if PRELOAD not in sys.modules:
        raise RuntimeError(f"the forkserver could not import {PRELOAD}; import it to see why")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)


def seed_everything(seed: int = 0) -> None:
    """Seed the generators of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def persistent_rank(channel: Connection, place: Place) -> None:
    """Serve tasks in one default process group until the parent closes the channel."""
    try:
        enter_rank(place)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place.folder / 'rendezvous'}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(minutes=10),
        )
        background = _Background()
        threading.excepthook = background.in_thread
        sys.unraisablehook = background.unraisable
        environment = dict(os.environ)
        channel.send(None)
    except BaseException as error:  # noqa: BLE001 - reported to the parent.
        channel.send(describe(place.rank, error))
        return
    with contextlib.suppress(EOFError):
        while True:
            task = channel.recv_bytes()
            os.ftruncate(1, 0)
            channel.send(_serve(task, place, background))
            _restore(environment)


def _serve(task: bytes, place: Place, background: _Background) -> bytes | Failure:
    """Run one task and prove that it left nothing behind that the next one could feel."""
    try:
        seed_everything()
        threads = set(threading.enumerate())
        with strict_warnings():
            result = pickle.dumps(_call(task, place))
            background.check()
        _check_threads(threads)
        _drop_groups()
    except BaseException as error:  # noqa: BLE001 - reported to the parent.
        return describe(place.rank, error)
    return result


def _call(task: bytes, place: Place) -> Any:
    call: Task = pickle.loads(task)
    return call.fn(Context(place.rank, place.world_size, call.tmp_path), *call.args)


def _check_threads(before: set[threading.Thread]) -> None:
    for thread in set(threading.enumerate()) - before:
        # fsspec keeps one thread for the whole process, once a file system needs it.
        if thread.name.startswith(("Dummy", "fsspecIO")) or type(thread).__name__ == "TMonitor":
            continue
        thread.join(timeout=2)
        if thread.is_alive():
            raise RuntimeError(f"the test left its thread {thread.name!r} running")


def _drop_groups() -> None:
    """Destroy the groups a test made, once every rank is through with it."""
    if not dist.is_initialized():
        raise RuntimeError("the test destroyed the default process group; use isolated=True")
    dist.barrier()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _restore(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def isolated_rank(channel: Connection, place: Place, task: bytes, port: int) -> None:
    """Run one task as torchrun would start it: environment set, no process group made."""
    try:
        enter_rank(place)
        os.environ.update(torchrun_environment(place, port))
        seed_everything()
        channel.send(None)
        with strict_warnings():
            result = pickle.dumps(_call(task, place))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001 - reported to the parent.
        traceback.print_exc()
        channel.send(describe(place.rank, error))
        sys.exit(1)
    channel.send(result)


def torchrun_environment(place: Place, port: int) -> dict[str, str]:
    """Return the variables that ``torchrun`` sets for this rank on a single node."""
    rank, size = str(place.rank), str(place.world_size)
    return {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "harness",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }
