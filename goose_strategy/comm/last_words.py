"""What a rank writes before it ends: the first cause, who was heard of last, all stacks.

``faulthandler`` writes the stacks; the rest is ours, because a stack shows where a rank waited but
not that another one, long dead, is to blame.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

EXIT_CODE = 1


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why the ranks end.

    Args:
        rank: Global rank on which it happened.
        place: That rank in words, e.g. ``rank 5 (pp 1, dp 0, tp 1)``.
        what: What it was doing.
        stage: Pipeline stage concerned.
        microbatch: Microbatch concerned.
        error: The exception in one line, or what was observed.
        details: Text of the traceback; empty if there was no exception.
    """

    rank: int
    place: str
    what: str
    stage: int | None = None
    microbatch: int | None = None
    error: str
    details: str = ""

    def describe(self) -> str:
        """Return one line: where, in what, which error."""
        return f"{self.place} in {where(self.what, self.stage, self.microbatch)}: {self.error}"

    def to_json(self) -> str:
        """Write for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Cause:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


def where(what: str, stage: int | None, microbatch: int | None) -> str:
    """Return what a rank is doing in words, e.g. ``'backward' (stage 1, microbatch 3)``."""
    numbers = {"stage": stage, "microbatch": microbatch}
    known = ", ".join(f"{name} {value}" for name, value in numbers.items() if value is not None)
    return f"'{what}'" + (f" ({known})" if known else "")


def error_line(error: BaseException) -> str:
    """Return type and message of an exception in one line."""
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def end_process(lines: Sequence[str], *, stacks: bool) -> None:
    """Write ``lines`` (and all stacks) to stderr and end the process at once.

    No cleanup runs: destructors of process groups wait for peers that will not answer.

    Args:
        lines: What to say.
        stacks: Whether the stacks of all threads are of interest.
    """
    stream = _real_stderr()
    # A closed or full stderr must not keep the process alive.
    with contextlib.suppress(Exception):
        stream.write("\n".join(["", *lines, ""]))
        stream.flush()
        if stacks:
            faulthandler.dump_traceback(file=stream, all_threads=True)
        stream.flush()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(EXIT_CODE)


def _real_stderr() -> TextIO:
    """Return a stderr with a file descriptor, also where a test runner has replaced it."""
    for stream in (sys.stderr, sys.__stderr__):
        with contextlib.suppress(AttributeError, io.UnsupportedOperation, OSError, ValueError):
            if stream is not None:
                stream.fileno()
                return stream
    return os.fdopen(os.dup(2), "w")
