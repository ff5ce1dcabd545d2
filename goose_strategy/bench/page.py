"""A chart as a page of its own: inline SVG, nothing to load, a tip on every box."""

from __future__ import annotations

from html import escape

from goose_strategy.bench.chart import FAINT, IDLE, INK, Chart

LEFT, RIGHT, TOP, BOTTOM = 110, 70, 88, 58
ROW, GAP = 40, 16
WIDTH = 1200
_FONT = "font-family='system-ui, Helvetica, Arial, sans-serif'"


def html(chart: Chart) -> str:
    """Return the page.

    Args:
        chart: What it shows.
    """
    height = TOP + len(chart.rows) * (ROW + GAP) + BOTTOM
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' {_FONT}>",
        _text(LEFT, 28, chart.title, size=18, weight="600"),
        _text(LEFT, 50, chart.subtitle, size=13, colour=FAINT),
        *_legend(chart),
        *_rows(chart),
        *_messages(chart),
        *_boxes(chart),
        *_axis(chart, height),
        _text(LEFT, height - 8, chart.note, size=11, colour=FAINT),
        "</svg>",
    ]
    return (
        "<!doctype html>\n<html lang='en'>\n<head><meta charset='utf-8'>"
        f"<title>{escape(chart.title)}</title></head>\n"
        "<body style='margin:16px;background:#fff'>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _x(chart: Chart, at: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * at / chart.duration


def _y(row: int) -> float:
    return TOP + row * (ROW + GAP)


def _text(
    x: float, y: float, text: str, *, size: int, colour: str = INK, weight: str = "400"
) -> str:
    style = f"font-size='{size}' fill='{colour}' font-weight='{weight}'"
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(text)}</text>"


def _legend(chart: Chart) -> list[str]:
    parts, x = [], float(WIDTH - RIGHT)
    top = 40 if chart.legend_is_long else 0
    for index, (colour, meaning) in reversed(list(enumerate([*chart.legend, *chart.lines]))):
        x -= 7.0 * len(meaning) + 34
        height, y = (14, 16) if index < len(chart.legend) else (2, 22)
        y += top
        parts.append(f"<rect x='{x:.1f}' y='{y}' width='14' height='{height}' fill='{colour}'/>")
        parts.append(_text(x + 20, 28 + top, meaning, size=13))
    return parts


def _rows(chart: Chart) -> list[str]:
    parts = []
    for index, (name, idle) in enumerate(zip(chart.rows, chart.idle, strict=True)):
        y = _y(index)
        parts.append(
            f"<rect x='{LEFT}' y='{y}' width='{WIDTH - LEFT - RIGHT}' height='{ROW}' "
            f"fill='{IDLE}'/>"
        )
        first, second = name.split("\n")
        parts.append(_text(8, y + 17, first, size=13))
        parts.append(_text(8, y + 33, second, size=11, colour=FAINT))
        parts.append(_text(WIDTH - RIGHT + 10, y + 25, f"{idle} idle", size=12, colour=FAINT))
    return parts


def _messages(chart: Chart) -> list[str]:
    parts = []
    for message in chart.messages:
        down = message.target > message.source
        start = _y(message.source) + (ROW if down else 0)
        end = _y(message.target) + (0 if down else ROW)
        x1, x2 = _x(chart, message.sent), _x(chart, message.taken)
        parts.append(
            f"<line x1='{x1:.2f}' y1='{start}' x2='{x2:.2f}' y2='{end}' "
            f"stroke='{message.colour}' stroke-width='1.5'><title>{escape(message.tip)}</title>"
            "</line>"
        )
    return parts


def _boxes(chart: Chart) -> list[str]:
    parts = []
    for box in chart.boxes:
        x, y = _x(chart, box.start), _y(box.row)
        width = max(_x(chart, box.end) - x, 0.5)
        parts.append(
            f"<rect x='{x:.2f}' y='{y}' width='{width:.2f}' height='{ROW}' fill='{box.colour}' "
            f"stroke='#fff' stroke-width='0.75'><title>{escape(box.tip)}</title></rect>"
        )
        if width >= 8 * len(box.label):
            parts.append(
                f"<text x='{x + width / 2:.2f}' y='{y + ROW / 2 + 4.5}' font-size='13' fill='#fff' "
                f"text-anchor='middle' pointer-events='none'>{escape(box.label)}</text>"
            )
    return parts


def _axis(chart: Chart, height: int) -> list[str]:
    y = height - BOTTOM + 4
    parts = []
    for tick in ticks(chart.duration):
        x = _x(chart, tick)
        line = f"<line x1='{x:.1f}' y1='{y - 6}' x2='{x:.1f}' y2='{y}' stroke='{FAINT}'/>"
        parts += [line, _text(x - 4, y + 16, f"{tick:g}", size=11, colour=FAINT)]
    parts.append(_text(WIDTH - RIGHT + 10, y + 16, "ms", size=11, colour=FAINT))
    return parts


def ticks(duration: float) -> list[float]:
    """Return round marks of a time axis, about ten of them.

    Args:
        duration: Length of the axis; greater than 0.
    """
    step = 1e-6
    factors = (2.0, 2.5, 2.0)  # 1, 2, 5, 10, ...
    index = 0
    while duration / step > 12:
        step *= factors[index % 3]
        index += 1
    return [round(number * step, 9) for number in range(int(duration / step) + 1)]
