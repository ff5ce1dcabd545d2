"""One rank's refusal is every rank's.

Some things can be wrong on one rank alone: a stage whose optimizer holds a parameter twice, a layer
that cannot be cut and lives on the last stage only. If that rank raises and the others go on to the
next collective, they wait there until a deadline ends them and says nothing of the cause.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.errors import GooseError, PeerError, PlanError

if TYPE_CHECKING:
    from goose_strategy.mesh.mesh import ParallelMesh

T = TypeVar("T")
Failure: TypeAlias = tuple[type[Exception], str]


def agreed(mesh: ParallelMesh, step: Callable[[], T]) -> T:
    """Run a step on every rank; if it fails on one, raise on all of them. Collective.

    Args:
        mesh: The ranks.
        step: What may be refused. It must not wait for other ranks.

    Returns:
        What the step returned here.

    Raises:
        GooseError: Another rank's error, of its own class, where this rank's step went well.
    """
    if mesh.layout.world_size == 1:
        return step()
    mine: Failure | None = None
    try:
        value = step()
    except Exception as error:
        mine = type(error), str(error)
        all_gather_objects(mine, mesh.control)
        raise
    for rank, failure in enumerate(all_gather_objects(mine, mesh.control)):
        if failure is not None:
            raise _echo(rank, *failure)
    return value


def equal_everywhere(mesh: ParallelMesh, value: object, what: str) -> None:
    """Check that all ranks see the same. Collective.

    Args:
        mesh: The ranks.
        value: This rank's, of a type that compares.
        what: What it is, for the message.

    Raises:
        PlanError: On all ranks, if it differs.
    """
    values = all_gather_objects(value, mesh.control)
    rank = next((r for r, other in enumerate(values) if other != values[0]), None)
    if rank is not None:
        raise PlanError(
            f"rank {rank} and rank 0 see different things as {what}: {values[rank]} and "
            f"{values[0]}; give all ranks the same."
        )


def _echo(rank: int, kind: type[Exception], text: str) -> GooseError:
    if issubclass(kind, GooseError):
        return kind(text if "[rank " in text else f"{text} [on rank {rank}]")
    return PeerError(f"set-up failed on rank {rank}: {kind.__name__}: {text}")
