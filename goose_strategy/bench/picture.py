"""A chart as a PNG, through matplotlib, which is no dependency of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from goose_strategy.bench.chart import FAINT, IDLE, INK, Chart
from goose_strategy.errors import ConfigError

WIDTH_IN = 11.0
ROW_IN = 0.48
BOX = 0.7  # height of a box, where a row is 1
RIGHT = 0.935  # end of the rows, in parts of the width


def png(chart: Chart, path: Path) -> None:
    """Write the picture.

    Args:
        chart: What it shows.
        path: The file.

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"out={str(path)!r} needs matplotlib: pip install 'goose-strategy[plots]', or write "
            ".html or .json, which need nothing."
        ) from error
    # Without pyplot: no window system is asked for, and no state is left behind.
    height = 1.35 + ROW_IN * len(chart.rows) + (0.26 if chart.legend_is_long else 0.0)
    figure = Figure(figsize=(WIDTH_IN, height), dpi=100)
    FigureCanvasAgg(figure)
    left = _left(chart)
    axes = figure.add_axes((left, 0.48 / height, RIGHT - left, ROW_IN * len(chart.rows) / height))
    _draw(axes, chart)
    _words(figure, chart, height)
    figure.savefig(path, format="png", pil_kwargs={"optimize": True})


def _left(chart: Chart) -> float:
    """Return where the rows begin, in parts of the width, after the longest of their names."""
    longest = max(len(line) for name in chart.rows for line in name.split("\n"))
    return 0.025 + 0.0063 * max(longest, 8)


def _draw(axes: Any, chart: Chart) -> None:
    half = BOX / 2
    for index in range(len(chart.rows)):
        axes.broken_barh([(0, chart.duration)], (index - half, BOX), facecolors=IDLE)
    for message in chart.messages:
        way = 1 if message.target > message.source else -1
        ends = (message.source + way * half, message.target - way * half)
        axes.plot((message.sent, message.taken), ends, color=message.colour, lw=1.1)
    for box in chart.boxes:
        axes.broken_barh(
            [(box.start, box.end - box.start)],
            (box.row - half, BOX),
            facecolors=box.colour,
            edgecolors="white",
            linewidth=0.8,
        )
        inches = (box.end - box.start) / chart.duration * WIDTH_IN * (RIGHT - _left(chart))
        if inches > 0.1 * len(box.label):
            middle = (box.start + box.end) / 2
            axes.text(middle, box.row, box.label, color="w", ha="center", va="center", size=9)
    for index, idle in enumerate(chart.idle):
        axes.annotate(
            f"{idle} idle",
            (1.008, index),
            xycoords=("axes fraction", "data"),
            va="center",
            size=8.5,
            color=FAINT,
        )
    axes.set_xlim(0, chart.duration)
    axes.set_ylim(len(chart.rows) - 0.5, -0.5)
    axes.set_yticks(range(len(chart.rows)), chart.rows, linespacing=1.25)
    axes.tick_params(axis="y", length=0, labelsize=9, labelcolor=INK, pad=6)
    axes.tick_params(axis="x", labelsize=8.5, colors=FAINT)
    for side in ("top", "left", "right", "bottom"):
        axes.spines[side].set_visible(False)


def _words(figure: Any, chart: Chart, height: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    left = _left(chart)
    figure.text(left, 1 - 0.32 / height, chart.title, size=13, weight="bold", color=INK)
    figure.text(left, 1 - 0.58 / height, chart.subtitle, size=9.5, color=FAINT)
    figure.text(left, 0.06 / height, chart.note, size=8, color=FAINT)
    figure.text(RIGHT + 0.008, 0.292 / height, "ms", size=8.5, color=FAINT)
    below = 0.76 if chart.legend_is_long else 0.1
    figure.legend(
        handles=[
            *(Patch(color=colour, label=meaning) for colour, meaning in chart.legend),
            *(Line2D([], [], color=colour, lw=1.8, label=what) for colour, what in chart.lines),
        ],
        loc="upper right",
        bbox_to_anchor=(RIGHT, 1 - below / height),
        ncols=len(chart.legend) + len(chart.lines),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=1.4,
        borderaxespad=0.0,
    )
