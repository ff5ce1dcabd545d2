"""Run one contender as a fresh set of processes on this machine, and collect what it measured."""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from goose_strategy.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from goose_strategy.bench.job import EngineJob, Job

_WORKER = ("-m", "goose_strategy.bench.worker")
_ENGINE_WORKER = ("-m", "goose_strategy.bench.engine_worker")
_POLL_S = 0.1
_GRACE_S = 10.0  # for the others to say what they saw, after the first rank failed
_TAIL = 1500


class _Task(Protocol):
    """What the processes of a run must know."""

    @property
    def contender(self) -> str: ...

    @property
    def devices(self) -> int: ...

    @property
    def threads(self) -> int: ...

    def dump(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contender in one round.

    Attributes:
        step_ms: Wall time of each timed step, until its last rank ended it.
        cpu_s: CPU seconds of each timed step, summed over ranks and threads.
        losses: Loss of every step (the warm-up's too), mean over ranks.
        peak_mib: Peak memory of the worst rank.
        tokens: Tokens of one global batch.
    """

    step_ms: list[float]
    cpu_s: list[float]
    losses: list[float]
    peak_mib: float
    tokens: int

    @property
    def median_ms(self) -> float:
        """Median wall time of a step."""
        return statistics.median(self.step_ms)


def merge(ranks: list[dict[str, Any]], warmup: int) -> Run:
    """Merge what the ranks measured: a step lasts from the last rank's end to the last's next."""
    ends = [max(times) for times in zip(*(rank["ends"] for rank in ranks), strict=True)]
    cpu = [sum(times) for times in zip(*(rank["cpu"] for rank in ranks), strict=True)]
    timed = range(warmup, len(ends))
    return Run(
        step_ms=[1000 * (ends[index] - ends[index - 1]) for index in timed],
        cpu_s=[cpu[index] - cpu[index - 1] for index in timed],
        losses=[
            statistics.fmean(losses)
            for losses in zip(*(rank["losses"] for rank in ranks), strict=True)
        ],
        peak_mib=max(rank["peak_mib"] for rank in ranks),
        tokens=ranks[0]["tokens"],
    )


def run(job: Job, *, timeout_s: float) -> Run:
    """Run a job in ``job.devices`` processes.

    Raises:
        PeerError: If a rank fails or the time is over; with the end of the first failure's output.
    """
    return merge(_collect(job, _WORKER, timeout_s), job.warmup)


def run_engine(job: EngineJob, *, timeout_s: float) -> list[dict[str, Any]]:
    """Run the engine's measurement in ``job.devices`` processes.

    Returns:
        What every rank measured, in the order of the ranks.

    Raises:
        PeerError: If a rank fails or the time is over; with the end of the first failure's output.
    """
    return _collect(job, _ENGINE_WORKER, timeout_s)


def _collect(job: _Task, worker: Sequence[str], timeout_s: float) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="goose3d-bench-") as folder:
        results = [Path(folder) / f"rank{rank}.json" for rank in range(job.devices)]
        _run_ranks(job, worker, results, timeout_s)
        return [json.loads(result.read_text()) for result in results]


def _run_ranks(job: _Task, worker: Sequence[str], results: list[Path], timeout_s: float) -> None:
    port = _free_port()
    commands = [[sys.executable, *worker, str(result)] for result in results]
    ranks = [_start(job, rank, port, command) for rank, command in enumerate(commands)]
    deadline, failed = time.monotonic() + timeout_s, None
    try:
        while any(rank.poll() is None for rank in ranks):
            if failed is None:
                failed = next((i for i, rank in enumerate(ranks) if rank.poll()), None)
                deadline = (
                    deadline if failed is None else min(deadline, time.monotonic() + _GRACE_S)
                )
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
    finally:
        unfinished = [rank for rank in ranks if rank.poll() is None]
        for rank in unfinished:
            rank.kill()
        for rank in ranks:
            rank.wait()
    if failed is None:
        failed = next((i for i, rank in enumerate(ranks) if rank.returncode), None)
    if failed is not None:
        cause = f"ended with code {ranks[failed].returncode}"
        if unfinished and ranks[failed] in unfinished:
            cause = f"was still running after {timeout_s:.0f} s; raise --timeout"
        tail = results[failed].with_suffix(".log").read_text(errors="replace")[-_TAIL:]
        raise PeerError(
            f"bench contender={job.contender!r} {cause}. Its last output:\n{tail}", rank=failed
        )


def _start(job: _Task, rank: int, port: int, command: list[str]) -> subprocess.Popen[bytes]:
    world = str(job.devices)
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(job.threads),
        # Class paths of a recipe are found through the caller's import path.
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with Path(command[-1]).with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
        )
    if process.stdin is not None:
        process.stdin.write(job.dump().encode())
        process.stdin.close()
    return process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
