"""Every schedule trains as one process does: stages per rank, split backwards, recomputes, tp, dp.

The grid takes every schedule with some of everything else; ``make parity`` runs every combination
(``-m full``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from goose_strategy.grads.store import WeightGradWork
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.pipeline_parallel.engine import _Step
from goose_strategy.pipeline_parallel.schedule import Action, Kind
from goose_strategy.pipeline_parallel.tables.catalogue import CATALOGUE
from goose_strategy.pipeline_parallel.work import Work
from tests.harness.models import batches
from tests.parity.grid import Case, Plant, assert_parity
from tests.parity.session import Session

LENGTHS = (12, 5, 64, 7, 33, 16)
FAMILIES = ("llama", "gpt2", "bloom")
RECOMPUTES = ("none", "full", "layer")


def uneven(session: Session, _case: Case) -> None:
    """Steps of microbatches of every length, a call more than once, and one that accumulates."""
    for step in range(2):
        parts = [
            batches(1, batch_size=4, seq_len=length, seed=7 * step + number)[0]
            for number, length in enumerate(LENGTHS[step:])
        ]
        session.backward(session.loss(parts))
        session.step(0.5)


def case_of(schedule: str, family: Any, recompute: str, **mesh: int) -> Case:
    pipeline = (("recompute", recompute),)
    settings = (("layers", 9 if mesh["pp"] == 4 else 5),)
    return Case(family=family, schedule=schedule, pipeline=pipeline, settings=settings, **mesh)


def some() -> list[Case]:
    """Every schedule on three meshes, with the families and the recomputes taking turns."""
    meshes = [{"pp": 2, "dp": 2}, {"pp": 4}, {"pp": 2, "tp": 2}]
    found = []
    for row, schedule in enumerate(CATALOGUE):
        for column, mesh in enumerate(meshes):
            family = FAMILIES[(row + column) % 3]
            found.append(case_of(schedule, family, RECOMPUTES[(row + 2 * column) % 3], **mesh))
    return found


def every() -> Iterator[Case]:
    combinations = itertools.product(CATALOGUE, FAMILIES, RECOMPUTES, (2, 4), (1, 2))
    for schedule, family, recompute, pp, tp in combinations:
        yield case_of(schedule, family, recompute, pp=pp, tp=tp)


def named(case: Case) -> str:
    return f"{case}-{dict(case.pipeline)['recompute']}"


@pytest.mark.parametrize("case", some(), ids=named)
def test_one_process_is_matched(case: Case) -> None:
    assert_parity(case, scenario=uneven)


@pytest.mark.full
@pytest.mark.parametrize("case", list(every()), ids=named)
def test_one_process_is_matched_by_every_combination(case: Case) -> None:
    assert_parity(case, scenario=uneven)


# -- an error of each kind of action is found ------------------------------------------------------

# Nine rows in three microbatches of one shape, so that a wrong one fits.
ZBV = Case(pp=2, schedule="ZBVZeroBubble", steps=1, rows=9, settings=(("layers", 5),))
AGAIN = replace(ZBV, schedule="Interleaved1F1B", pipeline=(("recompute", "full"),))


@contextmanager
def _other_rows(_: ParallelMesh) -> Iterator[None]:
    """``F`` runs on the rows of another microbatch."""
    forward = Work.forward

    def wrong(self: Work, place: Any, received: Any) -> Any:
        rows = self._microbatches
        if place[0] == 1:
            self._microbatches = rows[::-1]
        out = forward(self, place, received)
        self._microbatches = rows
        return out

    with patch.object(Work, "forward", wrong):
        yield


@contextmanager
def _stale_gradient(_: ParallelMesh) -> Iterator[None]:
    """``B`` or ``I`` starts from what the microbatch before has sent."""
    backward = Work.backward
    former: dict[int, Any] = {}

    def wrong(self: Work, place: Any, gradients: Any) -> Any:
        gradients, former[place[0]] = former.get(place[0], gradients), gradients
        return backward(self, place, gradients)

    with patch.object(Work, "backward", wrong):
        yield


@contextmanager
def _weights_left_out(_: ParallelMesh) -> Iterator[None]:
    """``W`` of one microbatch does nothing."""
    run = Work.backward_weight

    def wrong(self: Work, place: Any) -> None:
        if place == (1, 1):
            del self._put_off[place]
        else:
            run(self, place)

    with patch.object(Work, "backward_weight", wrong):
        yield


@contextmanager
def _weights_twice(_: ParallelMesh) -> Iterator[None]:
    """``I`` accumulates the weights' gradients, too."""
    backward = Work.backward_input

    def wrong(self: Work, place: Any, gradients: Any) -> Any:
        out = backward(self, place, gradients)
        work = self._put_off[place]
        again = WeightGradWork(list(work._owed or []))
        again.run()
        return out

    with patch.object(Work, "backward_input", wrong):
        yield


@contextmanager
def _another_again(_: ParallelMesh) -> Iterator[None]:
    """``R`` computes another microbatch."""
    recompute = Work.recompute

    def wrong(self: Work, place: Any) -> None:
        rows = self._microbatches
        self._microbatches = rows[::-1]
        recompute(self, place)
        self._microbatches = rows

    with patch.object(Work, "recompute", wrong):
        yield


@contextmanager
def _doubled(_: ParallelMesh, *, name: str) -> Iterator[None]:
    """A message is twice what it should be."""
    run = getattr(_Step, name)

    def wrong(self: _Step, action: Action) -> None:
        box: Any = self.outputs if name == "send_forward" else self.input_gradients
        place = (action.stage, action.microbatch)
        box[place] = [2 * tensor for tensor in box[place]]
        run(self, action)

    with patch.object(_Step, name, wrong):
        yield


@contextmanager
def _handed_to_another(_: ParallelMesh) -> Iterator[None]:
    """In the middle of a V a stage gets what was handed over for the microbatch before."""
    forward = _Step.forward
    former: list[Any] = []

    def wrong(self: _Step, action: Action) -> None:
        place = (action.stage - 1, action.microbatch)
        if action.stage - 1 in self.local:
            former.append(self.outputs[place])
            self.outputs[place] = former[-2:][0]
        forward(self, action)

    with patch.object(_Step, "forward", wrong):
        yield


PLANTS: dict[str, tuple[Case, Plant]] = {
    "F": (ZBV, _other_rows),
    "B": (AGAIN, _stale_gradient),
    "I": (ZBV, _stale_gradient),
    "I with W": (ZBV, _weights_twice),
    "W": (ZBV, _weights_left_out),
    "R": (AGAIN, _another_again),
    "SEND_F": (ZBV, partial(_doubled, name="send_forward")),
    "SEND_B": (ZBV, partial(_doubled, name="send_backward")),
    "in memory": (ZBV, _handed_to_another),
}


@pytest.mark.parametrize("planted", PLANTS)
def test_a_planted_error_is_found(planted: str) -> None:
    case, plant = PLANTS[planted]
    assert_parity(case)
    with pytest.raises(AssertionError, match=r"gradients|losses"):
        assert_parity(case, plant=plant)


def test_every_kind_of_work_has_its_error() -> None:
    messages = {Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD}  # The other ends of the sends.
    # T is no action of the engine: the reducer sums tied weights (tests/data_parallel).
    assert {str(kind) for kind in set(Kind) - messages - {Kind.TIE}} <= set(PLANTS)
