"""A step lasts until its last rank ends it; a failed or hanging rank is told with its output."""

from __future__ import annotations

from pathlib import Path

import pytest

from goose_strategy.bench import world
from goose_strategy.bench.job import Job
from goose_strategy.errors import PeerError


def test_ranks_are_merged_by_the_last_one() -> None:
    ranks = [
        {"ends": [1.0, 2.0, 3.0], "cpu": [1.0, 1.5, 2.0], "losses": [4, 3, 2], "peak_mib": 10.0},
        {"ends": [1.1, 1.9, 3.5], "cpu": [1.0, 1.6, 2.2], "losses": [6, 5, 4], "peak_mib": 12.0},
    ]
    run = world.merge([rank | {"tokens": 64} for rank in ranks], warmup=1)
    assert run.step_ms == pytest.approx([900, 1500])  # 2.0 - 1.1, 3.5 - 2.0
    assert run.cpu_s == pytest.approx([1.1, 1.1])  # summed over ranks
    assert run.losses == [5, 4, 3]  # the warm-up's too
    assert (run.peak_mib, run.tokens) == (12.0, 64)
    assert run.median_ms == pytest.approx(1200)


def stand_in(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Let every rank run ``program`` in the worker's place."""
    worker = folder / "worker.py"
    worker.write_text("import os, sys, time\nrank = os.environ['RANK']\n" + program)
    monkeypatch.setattr(world, "_WORKER", (str(worker),))


def test_results_of_all_ranks_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = """\
import json
job = json.load(sys.stdin)
one = dict(ends=[1.0, 2.0], cpu=[1.0, 2.0], losses=[job["steps"]] * 2, peak_mib=float(rank))
open(sys.argv[1], "w").write(json.dumps(one | dict(tokens=int(os.environ["WORLD_SIZE"]))))
"""
    stand_in(monkeypatch, tmp_path, program)
    run = world.run(Job(devices=2, steps=1, warmup=1), timeout_s=20)
    assert (run.losses, run.peak_mib, run.tokens, run.step_ms) == ([1, 1], 1.0, 2, [1000.0])


def test_the_failing_rank_and_its_output_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(world, "_GRACE_S", 0.2)
    stand_in(monkeypatch, tmp_path, "sys.exit('no luck') if rank == '1' else time.sleep(60)\n")
    with pytest.raises(PeerError, match=r"(?s)ended with code 1.*no luck.*\[rank 1\]"):
        world.run(Job(devices=2), timeout_s=30)


def test_a_hanging_rank_is_ended_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, tmp_path, "print('asleep', flush=True); time.sleep(60)\n")
    with pytest.raises(PeerError, match=r"(?s)still running after 2 s; raise --timeout.*asleep"):
        world.run(Job(devices=1), timeout_s=2)
