"""The public names. A change here is a change for users: it belongs into CHANGELOG.md."""

from __future__ import annotations

import goose_strategy

PUBLIC = [
    "Goose3DFabricStrategy",
    "Goose3DProgressBar",
    "Goose3DStrategy",
    "GooseError",
    "Lion",
    "ParallelRuntime",
    "PipelineCallback",
    "PipelineConfig",
    "PipelineEvent",
    "PipelineStep",
    "RuntimeConfig",
    "TensorConfig",
    "TimelineRecorder",
    "ZeroConfig",
    "from_pretrained",
]


def test_the_public_names_are_these() -> None:
    assert sorted(goose_strategy.__all__) == PUBLIC


def test_every_public_name_exists_and_is_described() -> None:
    for name in goose_strategy.__all__:
        value = getattr(goose_strategy, name)
        assert callable(value), name
        # A class without one inherits its base's.
        own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
        assert own, f"{name} has no docstring of its own"


def test_public_names_are_listed() -> None:
    assert set(goose_strategy.__all__) <= set(dir(goose_strategy))
