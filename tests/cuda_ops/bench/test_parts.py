"""Parts keep to their time, and none stops the others."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from cuda_ops.bench import parts
from cuda_ops.bench.parts import CANNOT_RUN, Clock, Outcome, Part, command, run_parts


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module that does what its first argument says."""
    (tmp_path / "a_part.py").write_text(
        "import os, subprocess, sys, time\n"
        "print('first line', flush=True)\n"
        "sys.stderr.write('told why\\n')\n"
        "sys.stderr.flush()\n"
        "if sys.argv[1] == 'hang':\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(60)\n"
        "if sys.argv[1] == 'die':\n"
        "    os.kill(os.getpid(), 9)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return "a_part"


def test_a_module_that_succeeds(module: str) -> None:
    assert command(module, ["0"], Clock(30)) == (["first line"], False)


@pytest.mark.parametrize(("how", "status"), [("1", "1"), ("7", "7"), ("die", "-9")])
def test_a_module_that_fails(module: str, how: str, status: str) -> None:
    lines, failed = command(module, [how], Clock(30))
    assert failed
    assert lines == ["first line", f"a_part: FAILED, exit status {status}", "told why"]


def test_a_module_that_cannot_run_here(module: str) -> None:
    lines, failed = command(module, [str(CANNOT_RUN)], Clock(30))
    assert (lines, failed) == (["a_part: not run, first line"], False)


def test_a_module_that_is_not_there() -> None:
    assert command("no_such_package.part", [], Clock(30)) == (
        ["no_such_package.part: not run, it is not installed"],
        False,
    )


def test_a_module_that_hangs_is_cut_with_all_its_processes(module: str) -> None:
    lines, failed = command(module, ["hang"], Clock(5))
    assert failed
    assert lines[0] == "first line"
    assert lines[2:] == ["a_part: FAILED, cut after 5 s", "told why"]
    child = int(lines[1])
    for _ in range(100):
        if not _runs(child):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {child} outlived the part")


def _runs(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_this_process_runs() -> None:
    assert _runs(os.getpid())


def test_a_failure_is_reported_and_stops_nobody() -> None:
    def broken(_clock: Clock) -> Outcome:
        raise ValueError("no bandwidth")

    said: list[str] = []
    ran = [
        Part("one", 1, lambda _clock: (["one is done"], False)),
        Part("two", 1, broken),
        Part("three", 1, lambda _clock: (["three is wrong"], True)),
        Part("four", 1, lambda _clock: (["four is done"], False)),
    ]
    assert run_parts(ran, Clock(30), said.extend)
    assert said == [
        "one is done",
        "two: FAILED, ValueError: no bandwidth",
        "three is wrong",
        "four is done",
    ]
    assert not run_parts([ran[0], ran[3]], Clock(30), said.extend)


def test_parts_get_their_time_and_no_more_than_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(parts.time, "monotonic", lambda: now[0])
    given: list[float] = []

    def slow(clock: Clock) -> Outcome:
        given.append(clock.left)
        now[0] += 6
        return [f"cut: {clock.left <= 0}"], False

    said: list[str] = []
    every = [Part(f"part {n}", 5, slow) for n in range(4)]
    assert not run_parts(every, Clock(16), said.extend)
    assert given == [5, 5, 4]
    assert said == ["cut: True"] * 3 + ["part 3: not run, the time is over"]
