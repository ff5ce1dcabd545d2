"""An error says where in the mesh it arose, and is caught by what it means."""

from __future__ import annotations

import pickle

import pytest

from goose_strategy import errors
from goose_strategy.errors import (
    BatchError,
    CallbackError,
    CheckpointError,
    ConfigError,
    GooseError,
    MeshError,
    PeerError,
    PlanError,
    PrivacyError,
    ScheduleError,
)

CLASSES = [
    BatchError,
    CallbackError,
    CheckpointError,
    ConfigError,
    MeshError,
    PeerError,
    PlanError,
    PrivacyError,
    ScheduleError,
]


def test_the_place_follows_the_message() -> None:
    error = ScheduleError("1F3 failed.", rank=5, axis="pp", stage=1, microbatch=3)
    assert str(error) == "1F3 failed. [rank 5, axis pp, stage 1, microbatch 3]"
    assert (error.rank, error.axis, error.stage, error.microbatch) == (5, "pp", 1, 3)


def test_zero_is_a_place_and_nothing_is_not() -> None:
    assert str(GooseError("lost", rank=0, stage=0)) == "lost [rank 0, stage 0]"
    assert str(GooseError("lost")) == "lost"


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_ours_and_picklable(kind: type[GooseError]) -> None:
    assert issubclass(kind, GooseError)
    assert kind.__doc__
    copy = pickle.loads(pickle.dumps(kind("text", rank=2)))
    assert type(copy) is kind
    assert str(copy) == "text [rank 2]"


def test_wrong_values_are_value_errors_and_the_rest_fails_at_run_time() -> None:
    values = {kind for kind in CLASSES if issubclass(kind, ValueError)}
    assert values == {ConfigError, PlanError, BatchError}
    assert all(issubclass(kind, RuntimeError) for kind in set(CLASSES) - values)


def test_all_classes_are_listed_here() -> None:
    found = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, GooseError)}
    assert found == {GooseError, *CLASSES}
