"""Errors of goose-strategy, one class per cause.

Lightning and torch raise plain ``RuntimeError`` from deep inside a collective, which names neither
the rank nor the stage that failed. Every class here can carry the place in the mesh where the
error arose, and prints it after the message.
"""

from __future__ import annotations


class GooseError(Exception):
    """Base of all errors raised by goose-strategy.

    Args:
        message: What was wrong as ``name=value``, what is allowed, what to change.
        rank: Global rank on which the error arose.
        axis: Mesh axis concerned (``"tp"``, ``"pp"`` or ``"dp"``).
        stage: Pipeline stage concerned.
        microbatch: Index of the microbatch concerned.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        axis: str | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
    ) -> None:
        self.rank = rank
        self.axis = axis
        self.stage = stage
        self.microbatch = microbatch
        place = {"rank": rank, "axis": axis, "stage": stage, "microbatch": microbatch}
        known = ", ".join(f"{name} {value}" for name, value in place.items() if value is not None)
        super().__init__(f"{message} [{known}]" if known else message)


class ConfigError(GooseError, ValueError):
    """A setting is wrong; raised before any process group exists."""


class MeshError(GooseError, RuntimeError):
    """The device mesh was asked for something it cannot give."""


class PlanError(GooseError, ValueError):
    """The model cannot be split the way the settings ask for."""


class ScheduleError(GooseError, RuntimeError):
    """A pipeline schedule is invalid or broke while it ran."""


class CallbackError(GooseError, RuntimeError):
    """A pipeline callback raised; the message names it and the action it was told of."""


class BatchError(GooseError, ValueError):
    """A batch cannot be trained on: empty, ragged, or different on ranks that must agree."""


class PrivacyError(GooseError, RuntimeError):
    """Going on would break what private training promises; nothing was released."""


class CheckpointError(GooseError, RuntimeError):
    """A checkpoint is missing, truncated, or belongs to another model."""


class PeerError(GooseError, RuntimeError):
    """Another rank failed or was lost; the message carries the first cause."""
