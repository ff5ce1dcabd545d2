"""The watchdog: who is ended, how soon, and what is said; who is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.comm.p2p import StageLink
from goose_strategy.comm.watchdog import Watchdog
from goose_strategy.errors import ConfigError
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from tests.harness.worker import ROOT
from tests.harness.world import _free_port, run_ranks

WAIT_S = 40.0


def _mesh(ctx, *, by_file, pp=1):
    """Start the world by file or by TCP and build the mesh."""
    if by_file:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{ctx.tmp_path}/store",
            rank=ctx.rank,
            world_size=ctx.world_size,
            timeout=timedelta(seconds=WAIT_S),
        )
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=WAIT_S))
    layout = MeshLayout.from_world(ctx.world_size, tp=1, pp=pp)
    return ParallelMesh.create(
        layout, device=torch.device("cpu"), timeout=timedelta(seconds=WAIT_S)
    )


def _step(mesh, watchdog, number):
    with (
        watchdog.guard("train step"),
        watchdog.guard("forward", stage=mesh.pp_rank, microbatch=number),
    ):
        all_reduce(torch.ones(4), mesh.world)


def _one_raises(ctx, by_file):
    mesh = _mesh(ctx, by_file=by_file, pp=ctx.world_size)
    watchdog = Watchdog(mesh)
    _step(mesh, watchdog, 0)
    with (
        watchdog.guard("train step"),
        watchdog.guard("backward", stage=mesh.pp_rank, microbatch=3),
    ):
        if ctx.rank == 1:
            raise ValueError("the planted error")
        all_reduce(torch.ones(4), mesh.world)


@pytest.mark.parametrize("by_file", [True, False])
def test_an_exception_ends_all_ranks_with_its_traceback(by_file):
    deaths = run_ranks(_one_raises, 4, by_file, isolated=True, expect_death=range(4))
    for death in deaths:
        assert death.exit_code == 1
        assert death.after_s < 10 + 5, death.output  # imports and set-up included
    for death in deaths[:1] + deaths[2:]:
        place = "rank 1 (pp 1, dp 0, tp 0) in 'backward' (stage 1, microbatch 3)"
        assert f"{place}: ValueError: the planted error" in death.output
        assert 'raise ValueError("the planted error")' in death.output


def _one_is_killed(ctx, by_file, victim):
    mesh = _mesh(ctx, by_file=by_file, pp=ctx.world_size)
    watchdog = Watchdog(mesh)
    _step(mesh, watchdog, 0)
    with (
        watchdog.guard("train step"),
        watchdog.guard("forward", stage=mesh.pp_rank, microbatch=2),
    ):
        if ctx.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if mesh.pp_rank > 0:
            link = StageLink(ctx.rank - 1, mesh.pp_forward)
            link.post_receive([(4,)], [torch.float32]).wait()
        else:
            all_reduce(torch.ones(4), mesh.world)


@pytest.mark.parametrize(("by_file", "victim"), [(True, 1), (False, 1), (False, 0)])
def test_a_killed_rank_ends_the_others_and_is_named(by_file, victim):
    deaths = run_ranks(_one_is_killed, 4, by_file, victim, isolated=True, expect_death=range(4))
    assert deaths[victim].exit_code == -signal.SIGKILL
    for death in deaths:
        assert death.after_s < 10 + 5, death.output
    waiting = deaths[victim + 1].output
    assert f"rank {victim + 1} waited for rank {victim} for" in waiting
    assert "microbatch 2" in waiting


def _one_stops(ctx, by_file, victim):
    mesh = _mesh(ctx, by_file=by_file, pp=ctx.world_size)
    watchdog = Watchdog(mesh, first_step_timeout_s=30.0, step_timeout_s=2.0)
    _step(mesh, watchdog, 0)
    if ctx.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    _step(mesh, watchdog, 1)


@pytest.mark.parametrize(("by_file", "victim"), [(True, 1), (False, 1), (False, 0)])
def test_a_stopped_rank_ends_the_others_at_the_deadline(by_file, victim):
    deaths = run_ranks(
        _one_stops,
        3,
        by_file,
        victim,
        isolated=True,
        expect_death=[rank for rank in range(3) if rank != victim],
        expect_stopped=[victim],
    )
    for death in deaths:
        if death.rank == victim:
            continue
        assert death.exit_code == 1
        assert 2 < death.after_s < 2 + 10 + 5
        assert "no progress for 2 s" in death.output
        assert "(stage" in death.output
        assert "Thread" in death.output  # the stacks
    if victim:
        told = "".join(death.output for death in deaths)
        assert f"rank {victim}: no report (stopped, lost, or not in any step)" in told
    else:
        assert "its host (usually rank 0) is stopped or lost" in deaths[1].output


def _lives(ctx, by_file):
    mesh = _mesh(ctx, by_file=by_file)
    watchdog = Watchdog(mesh, first_step_timeout_s=1.0, step_timeout_s=0.5)
    for number in range(3):
        _step(mesh, watchdog, number)
    time.sleep(1.5)  # long user code
    _step(mesh, watchdog, 3)
    watchdog.check()
    if ctx.rank == 0:
        watchdog.stop()
        watchdog.stop()
    again = Watchdog(mesh)
    _step(mesh, again, 0)
    if ctx.rank == 1:
        mesh.close()
        dist.destroy_process_group()
        time.sleep(1.5)  # rank 0, the host of the store, is gone by now
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("by_file", [True, False])
def test_a_normal_run_ends_normally(by_file):
    stopped, running = run_ranks(_lives, 2, by_file, isolated=True)
    assert stopped.count("goose-watchdog") == 1
    assert running.count("goose-watchdog") == 2


def _nested(ctx):
    mesh = ParallelMesh.create(
        MeshLayout.from_world(ctx.world_size, tp=1, pp=1),
        device=torch.device("cpu"),
        timeout=timedelta(seconds=WAIT_S),
    )
    watchdog = Watchdog(mesh, first_step_timeout_s=30.0, step_timeout_s=0.6)
    try:
        _step(mesh, watchdog, 0)
        with watchdog.guard("train step"):
            for number in range(4):  # each is progress, although their sum is past the deadline
                with watchdog.guard("forward", microbatch=number):
                    time.sleep(0.4)
                time.sleep(0.4)
        watchdog.check()
    finally:
        watchdog.stop()
        mesh.close()
    return True


def test_entering_and_leaving_a_section_is_progress():
    assert run_ranks(_nested, 2) == [True, True]


def test_a_failure_outside_of_a_section_is_published_too():
    deaths = run_ranks(_user_code_fails, 2, isolated=True, expect_death=range(2))
    assert "in 'user code': KeyError: 'lost'" in deaths[1].output


def _user_code_fails(ctx):
    mesh = _mesh(ctx, by_file=False)
    watchdog = Watchdog(mesh)
    dist.barrier()
    if ctx.rank == 0:
        error = KeyError("lost")
        watchdog.fail(error)
        raise error
    with watchdog.guard("forward"):
        all_reduce(torch.ones(1), mesh.world)


EXIT = """
import time, torch, torch.distributed as dist
from datetime import timedelta
from goose_strategy.comm.watchdog import Watchdog
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh

dist.init_process_group("gloo")
mesh = ParallelMesh.create(
    MeshLayout(tp=1, pp=1, dp=2), device=torch.device("cpu"), timeout=timedelta(seconds=30)
)
watchdog = Watchdog(mesh)
with watchdog.guard("train step"):
    watchdog._reporter.poll_every(1e-5)  # nearly always inside the store
    time.sleep(1.0)
watchdog._reporter.poll_every(1e-5)
time.sleep(0.2)
"""


def test_an_interpreter_that_exits_takes_its_watchdog_along():
    """A thread inside the store while the interpreter ends would abort the process."""
    port = str(_free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT],
            env={
                **os.environ,
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"},
                **{"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)},
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=50)
        assert rank.returncode == 0, said
        assert "terminate" not in said


def _alone(ctx):
    mesh = ParallelMesh.create(
        MeshLayout(tp=1, pp=1, dp=1), device=torch.device("cpu"), timeout=timedelta(seconds=5)
    )
    watchdog = Watchdog(mesh, step_timeout_s=0.01, first_step_timeout_s=0.01)
    with watchdog.guard("forward"):
        time.sleep(0.1)
    with pytest.raises(ValueError, match="mine"), watchdog.guard("forward"):
        raise ValueError("mine")
    with watchdog.guard("forward"):
        pass
    watchdog.stop()
    return [t.name for t in threading.enumerate() if t.name.startswith("goose")]


def test_one_rank_alone_is_not_watched():
    assert run_ranks(_alone, 1) == [[]]


def test_timeouts_are_checked():
    with pytest.raises(ConfigError, match="step_timeout_s=0"):
        Watchdog(None, step_timeout_s=0)  # type: ignore[arg-type]
