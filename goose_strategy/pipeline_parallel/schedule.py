"""Pipeline schedules as tables of actions: the notation, and the two classic schedules.

torch's schedules are loops inside classes that also run them, which ties the order of work to one
runtime, refuses fewer microbatches than stages under 1F1B, and cannot be looked at before it
hangs. Here a schedule is a function ``(stages, microbatches) -> table``, and the table is the only
thing that decides an order: the engine executes it as it stands. The notation is torch's: ``2F0``
is stage 2's forward of microbatch 0, ``1RECV_B3`` the receive of a gradient. Schedules with
several stages per rank, the checks and the simulator are in
:mod:`goose_strategy.pipeline_parallel.tables`.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from goose_strategy.errors import ScheduleError


class Kind(StrEnum):
    """What an action does; the values are torch's names, but for ``R`` and ``T``."""

    FORWARD = "F"
    """Run the stage on one microbatch."""
    BACKWARD = "B"
    """Run the backward of one microbatch: ``I`` and ``W`` in one."""
    INPUT = "I"
    """Compute the gradients of the inputs only, which the previous stage waits for."""
    WEIGHT = "W"
    """Compute the gradients of the weights, which nobody waits for; after ``I``."""
    RECOMPUTE = "R"
    """Run the forward again, from its stored inputs; right before ``B`` or ``I``."""
    TIE = "T"
    """Sum the gradients of a tied weight over the first and the last stage. Its microbatch is 0."""
    SEND_FORWARD = "SEND_F"
    """Start sending the outputs to the next stage."""
    RECEIVE_FORWARD = "RECV_F"
    """Post the receive of the previous stage's outputs; ``F`` waits for it."""
    SEND_BACKWARD = "SEND_B"
    """Start sending the gradients of the inputs to the previous stage."""
    RECEIVE_BACKWARD = "RECV_B"
    """Post the receive of the gradients of the outputs; ``B`` waits for it."""


COMPUTE = (Kind.FORWARD, Kind.BACKWARD)
"""The kinds of the schedules whose backward is not split."""
MESSAGES = (
    Kind.SEND_FORWARD,
    Kind.RECEIVE_FORWARD,
    Kind.SEND_BACKWARD,
    Kind.RECEIVE_BACKWARD,
)
"""The kinds that :func:`~goose_strategy.pipeline_parallel.tables.lowering.lower` inserts."""


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
"""One row of actions per rank, in the order in which the rank executes them."""


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
