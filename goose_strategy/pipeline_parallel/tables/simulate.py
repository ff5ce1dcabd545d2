"""When each action of a table would start and end, and pictures of that.

torch can draw a table but not time one. Here the costs are given per stage and kind, so that
schedules can be compared before any rank runs, on measured costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from goose_strategy.errors import ConfigError, ScheduleError
from goose_strategy.pipeline_parallel.schedule import MESSAGES, Action, Kind, Table
from goose_strategy.pipeline_parallel.tables.chunks import Chunks

_PER_STAGE = (
    "backward_input",
    "backward_weight",
    "recompute",
    "activations",
    "inputs",
    "resident",
)


@dataclass(frozen=True)
class Costs:
    """What the actions take, in any one unit of time.

    Attributes:
        forward: Cost of ``F``, per stage.
        backward_input: Cost of ``I``, per stage.
        backward_weight: Cost of ``W``, per stage; ``B`` costs both.
        recompute: Cost of ``R``, per stage; that of ``F`` if ``None``.
        latency: From the end of an action until another rank has its result.
        tie: From the time at which both ends have come to ``T`` until it is done. Neither waits
            for it before its row's end.
        activations: Memory of one microbatch's activations, per stage, in any unit; 1 each if
            ``None``. It takes no time, but decides with :func:`~.choose.choose` what fits.
        inputs: Memory of one microbatch's inputs, per stage, in the same unit; a stage that
            recomputes keeps them from ``F`` to ``R``. Nothing if ``None``.
        resident: Memory that each stage holds whatever is under way (weights, say), in the same
            unit. Nothing if ``None``.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    recompute: tuple[float, ...] | None = None
    latency: float = 0.0
    tie: float = 0.0
    activations: tuple[float, ...] | None = None
    inputs: tuple[float, ...] | None = None
    resident: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check that all costs are there and not negative.

        Raises:
            ConfigError: Naming the value and what is allowed.
        """
        for name in _PER_STAGE:
            given = getattr(self, name)
            if given is not None and len(given) != len(self.forward):
                raise ConfigError(
                    f"{name}={given!r} has {len(given)} stages, forward has {len(self.forward)}; "
                    "give a cost for every stage."
                )
        costs = (*self.forward, *self.backward_input, *self.backward_weight)
        for cost in (
            *costs,
            *(self.recompute or ()),
            *(self.activations or ()),
            *(self.inputs or ()),
            *(self.resident or ()),
            self.latency,
            self.tie,
        ):
            # Also refuses a value that is no number.
            if not cost >= 0:
                raise ConfigError(f"cost={cost!r} must be at least 0.")

    @classmethod
    def even(
        cls,
        stages: int,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        latency: float = 0.0,
    ) -> Costs:
        """Return the costs of stages of equal work."""
        return cls(
            (forward,) * stages,
            (backward_input,) * stages,
            (backward_weight,) * stages,
            latency=latency,
        )

    def of(self, action: Action) -> float:
        """Return for how long an action keeps its rank busy; messages and ``T`` do not."""
        stage = action.stage
        match action.kind:
            case Kind.FORWARD:
                return self.forward[stage]
            case Kind.BACKWARD:
                return self.backward_input[stage] + self.backward_weight[stage]
            case Kind.INPUT:
                return self.backward_input[stage]
            case Kind.WEIGHT:
                return self.backward_weight[stage]
            case Kind.RECOMPUTE:
                return (self.recompute or self.forward)[stage]
            case _:
                return 0.0


class Span(NamedTuple):
    """An action with its time.

    Attributes:
        action: The action.
        start: When it starts.
        end: When it ends.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A table with times.

    Attributes:
        makespan: From the first start to the last end.
        busy: Per rank, the sum of its actions' times.
        timeline: Per rank, its actions in order; no messages.
    """

    makespan: float
    busy: tuple[float, ...]
    timeline: tuple[tuple[Span, ...], ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Per rank, the time in which it does nothing."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle share of all ranks' time, between 0 and 1."""
        whole = self.makespan * len(self.busy)
        return 1 - sum(self.busy) / whole if whole else 0.0


def simulate(table: Table, costs: Costs, chunks: Chunks | None = None) -> Simulation:
    """Run a table on paper.

    Every rank takes its actions in order, each as soon as the rank is free and what it needs is
    there. Messages take ``costs.latency`` and never wait for one another; between two stages of
    one rank there is none. A table with and without its messages takes the same time.

    Args:
        table: One row per rank.
        costs: What the actions take, for as many stages as the table has.
        chunks: Which rank holds which stages; one stage per rank if ``None``.

    Returns:
        The times.

    Raises:
        ConfigError: If there are not as many costs as stages.
        ScheduleError: If the table cannot be executed to its end; names the actions that wait.
    """
    chunks = chunks or Chunks(len(table))
    if len(costs.forward) != chunks.stages:
        raise ConfigError(
            f"costs of {len(costs.forward)} stages do not fit a schedule of {chunks.stages}; give "
            "one for every stage."
        )
    timeline = time_table(table, chunks, costs.of, costs.latency)
    busy = tuple(sum(span.end - span.start for span in row) for row in timeline)
    ends = [row[-1].end for row in timeline if row]
    ties = [span.start for row in timeline for span in row if span.action.kind is Kind.TIE]
    if ties:
        ends.append(max(ties) + costs.tie)
    return Simulation(max(ends, default=0.0), busy, timeline)


def time_table(
    table: Table, chunks: Chunks, cost: Callable[[Action], float], latency: float
) -> tuple[tuple[Span, ...], ...]:
    """Return the times of all actions but the messages. See :func:`simulate`.

    Args:
        table: One row per rank.
        chunks: Which rank holds which stages.
        cost: Cost of an action.
        latency: Cost of a message.

    Returns:
        Per rank its actions with their times.

    Raises:
        ScheduleError: If the table cannot be executed to its end; names the actions that wait.
    """
    rows = [[action for action in row if action.kind not in MESSAGES] for row in table]
    clock = _Clock(rows, chunks, cost, latency)
    ready = list(range(len(rows)))
    while ready:
        ready += clock.advance(ready.pop())
    stuck = [
        str(row[len(spans)])
        for row, spans in zip(rows, clock.spans, strict=True)
        if len(spans) < len(row)
    ]
    if stuck:
        raise ScheduleError(f"The table deadlocks: {', '.join(stuck)} wait for one another.")
    return tuple(tuple(spans) for spans in clock.spans)


class _Clock:
    """The state of a simulation: how far each rank is, and what has been computed when."""

    def __init__(
        self,
        rows: Sequence[Sequence[Action]],
        chunks: Chunks,
        cost: Callable[[Action], float],
        latency: float,
    ) -> None:
        self.rows = rows
        self.cost = cost
        self.latency = latency
        self.holders = chunks.holders
        self.last = chunks.stages - 1
        self.spans: list[list[Span]] = [[] for _ in rows]
        self.now = [0.0] * len(rows)
        # By stage and microbatch: the end of the forward, and of the gradient of its inputs.
        self.outputs: dict[tuple[int, int], float] = {}
        self.gradients: dict[tuple[int, int], float] = {}

    def advance(self, rank: int) -> set[int]:
        """Run a rank as far as it comes; return the ranks that may go on after it."""
        row, spans = self.rows[rank], self.spans[rank]
        woken: set[int] = set()
        while len(spans) < len(row):
            action = row[len(spans)]
            start = self._start(action, rank)
            if start is None:
                break
            end = start + self.cost(action)
            spans.append(Span(action, start, end))
            self.now[rank] = end
            if action.kind is Kind.FORWARD:
                self.outputs[action.stage, action.microbatch] = end
                if action.stage < self.last:
                    woken.add(self.holders[action.stage + 1])
            elif action.kind in (Kind.BACKWARD, Kind.INPUT):
                self.gradients[action.stage, action.microbatch] = end
                if action.stage > 0:
                    woken.add(self.holders[action.stage - 1])
        return woken - {rank}

    def _start(self, action: Action, rank: int) -> float | None:
        """Return when an action can start, or ``None`` if that is not known yet."""
        stage, kind = action.stage, action.kind
        if kind is Kind.FORWARD:
            if stage == 0:
                return self.now[rank]
            source = stage - 1
            produced = self.outputs.get((source, action.microbatch))
        elif kind in (Kind.BACKWARD, Kind.INPUT):
            source = stage if stage == self.last else stage + 1
            known = self.outputs if stage == self.last else self.gradients
            produced = known.get((source, action.microbatch))
        else:
            return self.now[rank]
        if produced is None:
            return None
        travel = 0.0 if self.holders[source] == rank else self.latency
        return max(self.now[rank], produced + travel)


def draw(table: Table, chunks: Chunks | None = None) -> str:
    """Draw a table as a staircase, one row per rank.

    Every action takes one unit of time and starts as soon as its rank is free and what it needs
    has been computed; messages take no time and are left out.

    Args:
        table: A table that can be executed.
        chunks: Which rank holds which stages; one stage per rank if ``None``. With several, the
            number of the stage stands before the action.

    Returns:
        Lines such as ``"F0 F1 .. B0"``; ``..`` is idle time.
    """
    chunks = chunks or Chunks(len(table))
    timeline = time_table(table, chunks, lambda _: 1.0, 0.0)

    def label(action: Action) -> str:
        stage = "" if chunks.per_rank == 1 else str(action.stage)
        return f"{stage}{action.kind.value}{action.microbatch}"

    spans = [span for row in timeline for span in row]
    width = max(len(label(span.action)) for span in spans)
    columns = int(max(span.end for span in spans))
    lines = []
    for row in timeline:
        cells = ["..".ljust(width)] * columns
        for span in row:
            cells[int(span.start)] = label(span.action).ljust(width)
        lines.append(" ".join(cells).rstrip())
    return "\n".join(lines)
