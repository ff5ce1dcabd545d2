"""The worlds themselves: results, the first cause, hangs, deaths, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness.worker import ROOT, Context
from tests.harness.world import Death, RankFailure, run_ranks


def _sum_of_ranks(ctx: Context, scale: int) -> tuple[int, float, str, int]:
    total = torch.tensor([float(ctx.rank * scale)])
    dist.all_reduce(total)
    return ctx.rank, total.item(), str(ctx.tmp_path), torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 2, 4, 6, 8])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    results = run_ranks(_sum_of_ranks, world_size, 2)
    assert [result[0] for result in results] == list(range(world_size))
    assert {result[1] for result in results} == {float(world_size * (world_size - 1))}
    assert len({result[2] for result in results}) == 1
    assert {result[3] for result in results} == {1}


def _identity(ctx: Context) -> tuple[int, float, list[int]]:
    draw = torch.rand(1).item()
    return os.getpid(), draw, dist.get_process_group_ranks(dist.group.WORLD)


def test_a_world_persists_and_its_seed_does_not_advance() -> None:
    first, second = run_ranks(_identity, 2), run_ranks(_identity, 2)
    assert first == second
    assert first[0][0] != first[1][0]


def test_a_world_of_four_starts_quickly() -> None:
    run_ranks(_fresh, 4, isolated=True)
    begin = time.monotonic()
    run_ranks(_fresh, 4, isolated=True)
    # 0.5 s on an idle machine of two cores; the bound only has to tell it from importing torch.
    assert time.monotonic() - begin < 3.0


def _fresh(ctx: Context) -> tuple[bool, str, str, str]:
    assert "lightning" in sys.modules
    return (
        dist.is_initialized(),
        os.environ["RANK"],
        os.environ["WORLD_SIZE"],
        os.environ["MASTER_PORT"],
    )


def test_isolated_ranks_find_the_environment_of_torchrun() -> None:
    results = run_ranks(_fresh, 2, isolated=True)
    assert [result[:3] for result in results] == [(False, "0", "2"), (False, "1", "2")]
    assert results[0][3] == results[1][3]


def _initialise_from_environment(ctx: Context) -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    total = torch.tensor([ctx.rank])
    dist.all_reduce(total)
    return int(total)


def test_isolated_ranks_can_rendezvous() -> None:
    assert run_ranks(_initialise_from_environment, 3, isolated=True) == [3, 3, 3]


def _fails_on(ctx: Context, culprit: int) -> None:
    if ctx.rank == culprit:
        raise ValueError(f"planted on rank {culprit}")
    dist.barrier()


def test_the_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match="rank 2 of 4 failed: ValueError: planted") as caught:
        run_ranks(_fails_on, 4, 2)
    assert caught.value.rank == 2
    assert caught.value.kind == "ValueError"
    assert "in _fails_on" in caught.value.traceback
    # The broken world was replaced.
    assert len(run_ranks(_identity, 4)) == 4


def _breaks_connections(ctx: Context, culprit: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    dist.barrier()
    if ctx.rank == culprit:
        # The peers see a closed connection before this rank has reported anything.
        dist.destroy_process_group()
        time.sleep(0.4)
        raise KeyError("the first cause")
    dist.recv(torch.zeros(1), src=culprit)


def test_the_cause_is_shown_before_its_echoes() -> None:
    with pytest.raises(
        RankFailure, match="rank 1 of 3 failed: KeyError: 'the first cause'"
    ) as caught:
        run_ranks(_breaks_connections, 3, 1, isolated=True)
    assert "rank 0, later: " in str(caught.value)


def _dies(ctx: Context, number: int) -> str:
    print(f"last words of {ctx.rank}")
    if ctx.rank == 1:
        os.kill(os.getpid(), number)
    return "lived"


def test_a_killed_rank_is_reported() -> None:
    with pytest.raises(RankFailure, match="rank 1 ended with exit code -9") as caught:
        run_ranks(_dies, 2, signal.SIGKILL, isolated=True)
    assert "last words of 1" in str(caught.value)


def test_an_expected_death_is_a_result() -> None:
    lived, death = run_ranks(_dies, 2, signal.SIGKILL, isolated=True, expect_death={1})
    assert lived == "lived"
    assert isinstance(death, Death)
    assert death.exit_code == -signal.SIGKILL
    assert death.output == "last words of 1\n"
    assert death.after_s < 10


def test_an_expected_death_by_an_error_has_its_traceback() -> None:
    (death,) = run_ranks(_fails_on, 1, 0, isolated=True, expect_death={0})
    assert death.exit_code == 1
    assert "ValueError: planted on rank 0" in death.output


def test_a_rank_that_was_expected_to_die_must_die() -> None:
    with pytest.raises(RankFailure, match="rank 0 was expected to die but returned"):
        run_ranks(_fresh, 1, isolated=True, expect_death={0})


def test_a_stopped_rank_is_ended_when_all_others_have() -> None:
    lived, death = run_ranks(_dies, 2, signal.SIGSTOP, isolated=True, expect_stopped={1})
    assert (lived, death.exit_code) == ("lived", -signal.SIGKILL)


def _waits_for_nobody(ctx: Context) -> None:
    if ctx.rank == 0:
        dist.recv(torch.zeros(1), src=1)


def test_a_hang_is_killed_and_shows_where() -> None:
    pids = [result[0] for result in run_ranks(_identity, 2)]
    with pytest.raises(RankFailure, match=r"did not finish within timeout_s=1") as caught:
        run_ranks(_waits_for_nobody, 2, timeout_s=1.0)
    assert caught.value.kind == "Hang"
    assert "in _waits_for_nobody" in caught.value.traceback
    assert not any(_is_alive(pid) for pid in pids)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _warns(ctx: Context) -> None:
    warnings.warn("careless", UserWarning, stacklevel=1)


def test_a_warning_is_an_error_in_a_rank() -> None:
    with pytest.raises(RankFailure, match="UserWarning: careless"):
        run_ranks(_warns, 2)


def _forgets_a_thread(ctx: Context) -> None:
    threading.Thread(target=time.sleep, args=(20,), name="forgotten", daemon=True).start()


def _fails_in_a_thread(ctx: Context) -> None:
    thread = threading.Thread(target=_fails_on, args=(ctx, ctx.rank))
    thread.start()
    thread.join()


def test_threads_are_waited_for_and_their_errors_seen() -> None:
    with pytest.raises(RankFailure, match="left its thread 'forgotten' running"):
        run_ranks(_forgets_a_thread, 1)
    with pytest.raises(RankFailure, match="planted on rank 0"):
        run_ranks(_fails_in_a_thread, 1)


def _leaves_state(ctx: Context) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["LEFT_BEHIND"] = "1"
    dist.new_group([0])


def _state(ctx: Context) -> tuple[torch.dtype, bool, bool, int]:
    groups = dist.distributed_c10d._world.pg_map
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        "LEFT_BEHIND" in os.environ,
        len(groups),
    )


def test_nothing_is_left_for_the_next_test() -> None:
    run_ranks(_leaves_state, 2)
    assert run_ranks(_state, 2) == [(torch.float32, True, False, 1)] * 2


def test_a_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a top-level function"):
        run_ranks(lambda ctx: None, 1)


def test_expectations_need_isolation() -> None:
    with pytest.raises(ValueError, match="need isolated=True"):
        run_ranks(_fresh, 1, expect_death={0})


_ORPHANS = """
import os, signal
from tests.harness.test_world import _identity
from tests.harness.world import run_ranks
print([result[0] for result in run_ranks(_identity, 2)], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_do_not_outlive_their_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _ORPHANS],
        check=False, capture_output=True, text=True, env=environment, cwd=Path("/"),
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    pids = [int(text) for text in done.stdout.strip().strip("[]").split(",")]
    deadline = time.monotonic() + 5
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_is_alive(pid) for pid in pids)
