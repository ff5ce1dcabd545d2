"""Which forward takes the place of a model's own."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from goose_strategy.runtime.forward import DirectForward, PipelinedForward, PrivateForward
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.privacy.oracle import PrivateCase, start


def forwards(ctx: Context, case: PrivateCase) -> tuple[str, bool, str, str]:
    runtime, handle, _ = start(case)
    forward = handle.module.forward
    private = handle._private is not None
    copied = "copied"
    with suppress(ValueError):
        import copy

        copy.deepcopy(handle.module)
        copied = "copy"
    runtime.stop()
    return type(forward).__name__, private, copied, type(handle.module.forward).__name__


class PlainCase(PrivateCase):
    """A case without privacy."""

    def config(self) -> Any:
        """Return the settings of the mesh."""
        return replace(super().config(), privacy=None)


def test_the_forward_follows_from_the_settings() -> None:
    cases: tuple[tuple[PrivateCase, type, bool], ...] = (
        (PlainCase(), DirectForward, False),
        (PrivateCase(), PrivateForward, True),
        (PlainCase(pp=2), PipelinedForward, False),
        (PrivateCase(pp=2), PipelinedForward, True),
    )
    for case, kind, private in cases:
        for name, found, _, after in run_ranks(forwards, case.world_size, case):
            assert (name, found) == (kind.__name__, private)
            assert after == "method", "the model's own forward is not back"


def test_a_cut_model_refuses_to_be_copied() -> None:
    for case, expected in ((PrivateCase(), "copy"), (PrivateCase(tp=2), "copied")):
        for _, _, copied, _ in run_ranks(forwards, case.world_size, case):
            assert copied == expected
