"""All ranks do a step, and all of them learn whether it failed anywhere.

DCP does the same inside of its own steps, with an exception that derives from ``BaseException`` and
whose text is a dump of tracebacks. Here every step of a checkpoint, those outside of DCP included,
ends on all ranks in the same way: values, or one ``CheckpointError`` with the first cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from goose_strategy.mesh.mesh import ParallelMesh

_T = TypeVar("_T")


def collect(mesh: ParallelMesh, doing: str, step: Callable[[], _T]) -> list[_T]:
    """Run ``step`` on every rank and gather what it returned.

    Args:
        mesh: The ranks; collective over all of them.
        doing: What the step does, for the message: ``"checking the files of path='...'"``.
        step: Returns something picklable. Must not wait for other ranks, because another rank may
            have failed before it came to the same place.

    Returns:
        The values, in rank order.

    Raises:
        CheckpointError: On all ranks with the same text, if the step failed on one of them.
    """
    value: _T | None = None
    cause: Exception | None = None
    try:
        value = step()
    except Exception as err:  # noqa: BLE001  # whatever it is, the others must hear of it
        cause = err
    answers = all_gather_objects((describe(cause), value), mesh.control)
    for rank, (failure, _) in enumerate(answers):
        if failure is not None:
            raise CheckpointError(f"{doing} failed: {failure}", rank=rank) from cause
    return [answer for _, answer in answers]  # type: ignore[misc]  # no failure: all are values


def describe(cause: BaseException | None) -> str | None:
    """Return one line for an error: its text if it is ours, otherwise with its class in front."""
    if cause is None:
        return None
    return str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
