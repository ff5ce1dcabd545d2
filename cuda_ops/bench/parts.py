"""Parts of a check that has two minutes: each has its time, and none stops the others."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

Outcome: TypeAlias = tuple[list[str], bool]
"""Lines to print, and whether the part failed."""

CANNOT_RUN = 3
"""Exit status of a command that this machine cannot run; its last line says why."""

_TAIL = 12


class Clock:
    """The time that is left.

    Args:
        seconds: How much there is, from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._started = time.monotonic()
        self._seconds = seconds

    @property
    def passed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    @property
    def left(self) -> float:
        """Seconds that are left, 0 at least."""
        return max(self._seconds - self.passed, 0.0)

    def cut(self, seconds: float) -> Clock:
        """Return a clock for a part: so many seconds, but not more than are left here."""
        return Clock(min(seconds, self.left))


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        name: For the lines about it.
        seconds: How long it may take.
        run: Does it; looks at the clock now and then.
    """

    name: str
    seconds: float
    run: Callable[[Clock], Outcome]


def run_parts(parts: Sequence[Part], clock: Clock, say: Callable[[Sequence[str]], None]) -> bool:
    """Run all parts, each whatever became of the others.

    Args:
        parts: In order.
        clock: For all of them.
        say: Prints lines.

    Returns:
        Whether any failed.
    """
    bad = False
    for part in parts:
        if clock.left <= 0:
            say([f"{part.name}: not run, the time is over"])
            continue
        try:
            lines, failed = part.run(clock.cut(part.seconds))
        except Exception as error:  # noqa: BLE001  the other parts are to run; it is reported
            lines, failed = [f"{part.name}: FAILED, {type(error).__name__}: {error}"], True
        bad |= failed
        say(lines)
    return bad


def command(module: str, flags: Sequence[str], clock: Clock) -> Outcome:
    """Run ``python -m module`` in processes of its own; all of them end with the clock.

    Args:
        module: A module that prints its results, and ends with 0, 1 (failed) or `CANNOT_RUN`.
        flags: Its arguments.
        clock: Its time.

    Returns:
        What it printed, with a line about its end unless that was 0.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return [f"{module}: not run, it is not installed"], False
    with tempfile.TemporaryDirectory(prefix="goose-check-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        status = _run([sys.executable, "-m", module, *flags], out, err, clock)
        lines = out.read_text(errors="replace").splitlines()
        if status == 0:
            return lines, False
        if status == CANNOT_RUN:
            return [*lines[:-1], f"{module}: not run, {lines[-1] if lines else 'no reason'}"], False
        told = err.read_text(errors="replace").splitlines()[-_TAIL:]
        if status is None:
            return [*lines, f"{module}: FAILED, cut after {clock.passed:.0f} s", *told], True
        return [*lines, f"{module}: FAILED, exit status {status}", *told], True


def _run(line: Sequence[str], out: Path, err: Path, clock: Clock) -> int | None:
    """Run a command as a process group; return its status, or ``None`` if it was cut."""
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            line, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return process.wait(timeout=max(clock.left, 0.1))
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Ranks that outlived their first one, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
