"""A recorded step as boxes and lines, before it is known what draws them.

The picture and the page show the same chart; both draw what is listed here, so that they agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from goose_strategy.bench.recording import Recording, Row

# Distinct for colour-blind eyes, too; the darker ones carry white numbers.
COLOURS = {"F": "#3B6FB6", "B": "#E07B39", "I": "#E07B39", "W": "#5B9A68", "R": "#8E6BB0"}
MEANING = {
    "F": "forward",
    "B": "backward",
    "I": "gradients of inputs",
    "W": "gradients of weights",
    "R": "recompute",
}
PALEST = 0.3
"""How much white is in the colours of a rank's last stage, if it has several."""
LINES = {"F": "#7FA3D3", "B": "#ECAE86"}
CARRIES = {"F": "hidden states", "B": "their gradients"}
IDLE = "#F0F1F3"
INK = "#22262B"
FAINT = "#7A828C"


class Box(NamedTuple):
    """One action.

    Attributes:
        row: Which row, counted from the top.
        start: Milliseconds.
        end: Milliseconds.
        colour: Its colour.
        label: Its microbatch.
        tip: What it is, in words.
    """

    row: int
    start: float
    end: float
    colour: str
    label: str
    tip: str


class Message(NamedTuple):
    """A line from the row that sent to the row that waited.

    Attributes:
        source: Row of the sender.
        target: Row of the receiver.
        sent: Milliseconds at which it was launched.
        taken: Milliseconds at which the receiver had it.
        colour: Its colour.
        tip: What it is, in words.
    """

    source: int
    target: int
    sent: float
    taken: float
    colour: str
    tip: str


@dataclass(frozen=True)
class Chart:
    """What a picture shows.

    Attributes:
        title: What ran.
        subtitle: What it cost.
        note: How far to trust it.
        rows: Names of the rows.
        idle: Idle share of each row, in words.
        duration: Milliseconds, of the time axis.
        boxes: Actions.
        messages: Messages.
        legend: Colour and meaning of the boxes that occur.
        lines: Colour and meaning of the messages that occur.
    """

    title: str
    subtitle: str
    note: str
    rows: tuple[str, ...]
    idle: tuple[str, ...]
    duration: float
    boxes: tuple[Box, ...]
    messages: tuple[Message, ...]
    legend: tuple[tuple[str, str], ...]
    lines: tuple[tuple[str, str], ...]

    @property
    def legend_is_long(self) -> bool:
        """Whether the legend needs a line of its own beside the title."""
        return len(self.legend) + len(self.lines) > 4


def make_chart(recording: Recording) -> Chart:
    """Return the chart of a recorded step; its time begins with the first work.

    Args:
        recording: The step.
    """
    work = [span for row in recording.rows for span in row.work]
    zero = min(span.start for span in work)
    kinds = [kind for kind in COLOURS if any(span.kind == kind for span in work)]
    messages = _messages(recording, zero)
    boxes = [
        Box(
            index,
            span.start - zero,
            span.end - zero,
            _shade(COLOURS[span.kind], row.stages.index(span.stage), len(row.stages)),
            str(span.microbatch),
            f"{MEANING[span.kind]} of microbatch {span.microbatch} on stage {span.stage}, "
            f"{span.end - span.start:.3f} ms",
        )
        for index, row in enumerate(recording.rows)
        for span in row.work
    ]
    return Chart(
        title=f"{recording.schedule}: {recording.stages} stages, "
        f"{recording.microbatches} microbatches, step {recording.step}",
        subtitle=describe(recording),
        note=_note(recording),
        rows=tuple(_name(row, recording) for row in recording.rows),
        idle=tuple(_idle(row, recording) for row in recording.rows),
        duration=recording.duration,
        boxes=tuple(boxes),
        messages=tuple(messages),
        legend=tuple((COLOURS[kind], MEANING[kind]) for kind in kinds),
        lines=tuple(
            (LINES[kind], CARRIES[kind])
            for kind in LINES
            if any(message.colour == LINES[kind] for message in messages)
        ),
    )


def describe(recording: Recording) -> str:
    """Say in one line how long a step took, and how much of it was idle."""
    return (
        f"{recording.duration:.1f} ms; bubble {recording.bubble:.1%} measured, "
        f"{recording.least_bubble:.1%} predicted from the same work with free messages"
    )


def _note(recording: Recording) -> str:
    notes = []
    if recording.device != "cpu":
        notes.append(f"Times of the host, at which it launched work on {recording.device}.")
    if recording.clock_error:
        notes.append(f"Clocks of two ranks agree to {recording.clock_error:.3f} ms.")
    return " ".join(notes)


def _name(row: Row, recording: Recording) -> str:
    among = f", dp {row.dp}, tp {row.tp}" if len(recording.pipelines) > 1 else ""
    stages = ", ".join(map(str, row.stages))
    return f"stage{'s' * (len(row.stages) > 1)} {stages}\nrank {row.rank}{among}"


def _shade(colour: str, chunk: int, chunks: int) -> str:
    """Return a colour, paler for the later stages of a rank; white numbers stay readable."""
    white = PALEST * chunk / max(1, chunks - 1)
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + white * (255 - part)):02X}" for part in parts)


def _idle(row: Row, recording: Recording) -> str:
    others = next(rows for rows in recording.pipelines if row in rows)
    spans = [span for one in others for span in one.work]
    lasted = max(span.end for span in spans) - min(span.start for span in spans)
    busy = sum(span.end - span.start for span in row.work)
    return f"{1 - busy / lasted:.0%}" if lasted else ""


def _messages(recording: Recording, zero: float) -> list[Message]:
    """Pair each send with the receive on the neighbouring stage."""
    places = {
        (row.dp, row.tp, stage): index
        for index, row in enumerate(recording.rows)
        for stage in row.stages
    }
    found = []
    for target, row in enumerate(recording.rows):
        for span in row.spans:
            if not span.kind.startswith("RECV_"):
                continue
            kind = span.kind.removeprefix("RECV_")
            stage = span.stage + (-1 if kind == "F" else 1)
            source = places.get((row.dp, row.tp, stage))
            send = (f"SEND_{kind}", stage, span.microbatch)
            sent = None if source is None else _sent(recording.rows[source], send)
            if source is None or sent is None:
                continue
            took = f"{span.end - sent:.3f} ms until taken"
            tip = f"{CARRIES[kind]}, microbatch {span.microbatch}, {took}"
            times = (sent - zero, span.end - zero)
            found.append(Message(source, target, *times, LINES[kind], tip))
    return found


def _sent(row: Row, send: tuple[str, int, int]) -> float | None:
    starts = (span.start for span in row.spans if (span.kind, span.stage, span.microbatch) == send)
    return next(starts, None)
