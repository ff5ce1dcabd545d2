"""``goose3d timeline``: draw what ``TimelineRecorder`` recorded."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from typing_extensions import override

from goose_strategy.bench.chart import describe, make_chart
from goose_strategy.bench.page import html
from goose_strategy.bench.picture import png
from goose_strategy.bench.recording import Recording, load
from goose_strategy.bench.trace import trace
from goose_strategy.errors import ConfigError

ENDINGS = (".png", ".html", ".json")


def main(argv: Sequence[str]) -> int:
    """Draw one recorded step.

    Args:
        argv: A folder and options, see ``goose3d timeline --help``.

    Returns:
        The exit code.

    Raises:
        ConfigError: If the folder holds no recording, or an option is wrong.
    """
    options = parser().parse_args(argv)
    out: Path | None = options.out
    if out is not None and out.suffix not in ENDINGS:
        raise ConfigError(f"out={str(out)!r} must end with one of {', '.join(ENDINGS)}.")
    if out is not None and not out.parent.is_dir():
        raise ConfigError(f"out={str(out)!r} lies in a folder that does not exist; make it first.")
    recording = load(options.dir, options.step)
    if out is not None:
        write(recording, out)
    sys.stdout.write(summary(recording) + (f"  written       {out}\n" if out is not None else ""))
    return 0


def write(recording: Recording, out: Path) -> None:
    """Write a picture, a page or a trace, by the ending of the name."""
    if out.suffix == ".json":
        out.write_text(json.dumps(trace(recording)) + "\n", encoding="utf-8")
    elif out.suffix == ".html":
        out.write_text(html(make_chart(recording)), encoding="utf-8")
    else:
        png(make_chart(recording), out)


def summary(recording: Recording) -> str:
    """Return in a few lines what a step cost."""
    steps = ", ".join(map(str, recording.steps))
    shape = f"{recording.stages} stages, {recording.microbatches} microbatches"
    return (
        f"goose3d: step {recording.step} of {recording.schedule}, {shape}, "
        f"{len(recording.rows)} ranks\n  time          {describe(recording)}\n"
        f"  recorded      steps {steps}\n"
    )


class _Parser(argparse.ArgumentParser):
    @override
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see goose3d timeline --help.")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    options = _Parser(
        prog="goose3d timeline",
        description="Draw a step that TimelineRecorder recorded: what each rank did when, and how "
        "much of the time it was idle.",
    )
    options.add_argument("dir", type=Path, metavar="DIR", help="dir of the TimelineRecorder")
    options.add_argument(
        "--out",
        type=Path,
        help="x.png (needs matplotlib), x.html (a page of its own) or x.json (for Perfetto and "
        "chrome://tracing); without it, only the figures are printed",
    )
    options.add_argument("--step", type=int, help="which recorded step (default: the last)")
    return options
