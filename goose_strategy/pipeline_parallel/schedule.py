"""Pipeline schedules as tables of actions: pure data, made, checked and drawn without a process.

torch's schedules are loops inside classes that also run them, which ties the order of work to one
runtime, refuses fewer microbatches than stages under 1F1B, and cannot be looked at before it
hangs. Here a schedule is a function ``(stages, microbatches) -> table``, and the table is the only
thing that decides an order: the engine executes it as it stands. The notation is torch's: ``2F0``
is stage 2's forward of microbatch 0, ``1RECV_B3`` the receive of a gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from goose_strategy.errors import ScheduleError


class Kind(StrEnum):
    """What an action does; the values are torch's names."""

    FORWARD = "F"
    """Run the stage on one microbatch."""
    BACKWARD = "B"
    """Run the backward of one microbatch."""
    SEND_FORWARD = "SEND_F"
    """Start sending the outputs to the next stage."""
    RECEIVE_FORWARD = "RECV_F"
    """Post the receive of the previous stage's outputs; ``F`` waits for it."""
    SEND_BACKWARD = "SEND_B"
    """Start sending the gradients of the inputs to the previous stage."""
    RECEIVE_BACKWARD = "RECV_B"
    """Post the receive of the gradients of the outputs; ``B`` waits for it."""


COMPUTE = (Kind.FORWARD, Kind.BACKWARD)
"""The kinds that use the device; the others are messages."""


class Action(NamedTuple):
    """One entry of a table.

    Attributes:
        stage: Stage that acts.
        kind: What it does.
        microbatch: Index of the microbatch.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read an action in torch's notation, for example ``"2F0"``.

        Raises:
            ScheduleError: If the text is no action.
        """
        match = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)", text)
        if match is None or match[2] not in tuple(Kind):
            kinds = ", ".join(Kind)
            raise ScheduleError(
                f"action={text!r} is not of the form <stage><kind><microbatch> with one of {kinds}."
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


Table: TypeAlias = tuple[tuple[Action, ...], ...]
"""One row of actions per stage, in the order in which the stage executes them."""


def gpipe(stages: int, microbatches: int) -> Table:
    """All forwards, then all backwards, both in the order of the microbatches.

    Args:
        stages: Number of stages.
        microbatches: Number of microbatches, any number >= 1.

    Returns:
        The table of ``F`` and ``B`` actions.
    """
    return tuple(
        tuple(Action(stage, kind, mb) for kind in COMPUTE for mb in range(microbatches))
        for stage in range(stages)
    )


def one_f_one_b(stages: int, microbatches: int) -> Table:
    """Forwards until the last stage can start its backward, then one of each in turn.

    As fast as :func:`gpipe`, but stage ``s`` holds the activations of at most ``stages - s``
    microbatches instead of all.

    Args:
        stages: Number of stages.
        microbatches: Number of microbatches, any number >= 1 (fewer than stages too).

    Returns:
        The table of ``F`` and ``B`` actions.
    """
    rows = []
    for stage in range(stages):
        warm_up = min(stages - 1 - stage, microbatches)
        forwards = [Action(stage, Kind.FORWARD, mb) for mb in range(microbatches)]
        backwards = [Action(stage, Kind.BACKWARD, mb) for mb in range(microbatches)]
        row = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            row += [forward, backward]
        rows.append(tuple(row + backwards[microbatches - warm_up :]))
    return tuple(rows)


def forward_only(stages: int, microbatches: int) -> Table:
    """Only the forwards, for evaluation.

    Args:
        stages: Number of stages.
        microbatches: Number of microbatches.

    Returns:
        The table of ``F`` actions.
    """
    return tuple(
        tuple(Action(stage, Kind.FORWARD, mb) for mb in range(microbatches))
        for stage in range(stages)
    )


SCHEDULES: Mapping[str, Callable[[int, int], Table]] = {"GPipe": gpipe, "1F1B": one_f_one_b}
"""The schedules a user can name."""


def check_table(table: Table, microbatches: int, *, train: bool = True) -> None:
    """Check a table of ``F`` and ``B`` actions.

    Every stage runs each microbatch's ``F`` once and (when training) its ``B`` once and later,
    and all stages take the microbatches in the same order, because messages between two stages
    carry no number.

    Args:
        table: The table.
        microbatches: Number of microbatches.
        train: Whether backwards belong to it.

    Raises:
        ScheduleError: Naming the first action that is wrong.
    """
    expected = set(range(microbatches))
    for stage, row in enumerate(table):
        for action in row:
            if action.stage != stage or action.kind not in COMPUTE:
                raise ScheduleError(f"{action} does not belong into row {stage} of a table.")
        for kind in COMPUTE[: 2 if train else 1]:
            order = [action.microbatch for action in row if action.kind is kind]
            if len(order) != len(expected) or set(order) != expected:
                raise ScheduleError(
                    f"stage {stage} runs {kind} for microbatches {order}; each of "
                    f"0..{microbatches - 1} is needed once."
                )
            first = [action.microbatch for action in table[0] if action.kind is kind]
            if order != first:
                raise ScheduleError(
                    f"stage {stage} takes {kind} in the order {order}, stage 0 in {first}; "
                    "neighbours must agree, because their messages are not numbered."
                )
        for early, action in enumerate(row):
            partner = Action(stage, Kind.FORWARD, action.microbatch)
            if action.kind is Kind.BACKWARD and partner not in row[:early]:
                raise ScheduleError(f"{action} comes before {partner}.")


def peak_activations(table: Table) -> tuple[int, ...]:
    """Return, per stage, how many microbatches' activations are held at once at most."""
    peaks = []
    for row in table:
        held = peak = 0
        for action in row:
            held += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(action.kind, 0)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def draw(table: Table) -> str:
    """Draw a table of ``F`` and ``B`` actions as a staircase, one row per stage.

    Every action takes one unit of time and starts as soon as its stage is free and what it needs
    has been computed; messages take no time.

    Args:
        table: A table that passed :func:`check_table`.

    Returns:
        Lines such as ``"F0 F1 .. B0"``; ``..`` is idle time.
    """
    ends: dict[Action, int] = {}
    free = [0] * len(table)
    queues = [list(row) for row in table]
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue and all(need in ends for need in _needs(queue[0], len(table))):
                action = queue.pop(0)
                start = max([free[stage], *(ends[n] for n in _needs(action, len(table)))])
                free[stage] = ends[action] = start + 1
    width = max(len(f"{action.kind.value}{action.microbatch}") for action in ends)
    lines = []
    for stage in range(len(table)):
        cells = ["..".ljust(width)] * max(free)
        for action, end in ends.items():
            if action.stage == stage:
                cells[end - 1] = f"{action.kind.value}{action.microbatch}".ljust(width)
        lines.append(" ".join(cells).rstrip())
    return "\n".join(lines)


def _needs(action: Action, stages: int) -> list[Action]:
    """Return what other stages must have computed before ``action``."""
    if action.kind is Kind.FORWARD:
        return [action._replace(stage=action.stage - 1)] if action.stage > 0 else []
    return [action._replace(stage=action.stage + 1)] if action.stage < stages - 1 else []
