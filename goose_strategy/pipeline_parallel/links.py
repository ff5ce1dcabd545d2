"""The messages between a stage and its neighbours."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.comm.p2p import Metas, StageLink
from goose_strategy.errors import MeshError

if TYPE_CHECKING:
    from goose_strategy.comm.recorder import Recorder
    from goose_strategy.mesh.mesh import ParallelMesh


class Sent(Protocol):
    """A message under way to a neighbour."""

    def wait(self) -> None:
        """Wait until its tensors may be freed."""


class Expected(Protocol):
    """A message to come."""

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for it and return its tensors."""


class Link(Protocol):
    """One direction to one neighbour; :class:`~goose_strategy.comm.p2p.StageLink` is one."""

    def send(self, tensors: Sequence[Tensor], *, key: Hashable = None) -> Sent:
        """Start to send."""

    def receive(self, *, key: Hashable, expected: Metas | None = None) -> Expected:
        """Post a receive."""


@dataclass(frozen=True)
class StageLinks:
    """The four directions of a stage.

    Hidden states and their gradients use communicators of their own, so that neither waits for
    the other's turn.

    Attributes:
        from_previous: Receives hidden states; ``None`` on the first stage.
        to_previous: Sends their gradients; ``None`` on the first stage.
        to_next: Sends hidden states; ``None`` on the last stage.
        from_next: Receives their gradients; ``None`` on the last stage.
    """

    from_previous: Link | None = None
    to_previous: Link | None = None
    to_next: Link | None = None
    from_next: Link | None = None


def connect_stages(
    mesh: ParallelMesh, *, recorder: Recorder | None = None, deadline: timedelta | None = None
) -> StageLinks:
    """Make the links of this rank to its neighbours on the pipeline axis.

    Args:
        mesh: The mesh.
        recorder: Records the launches.
        deadline: How long a wait may last; the groups' own timeout if ``None``.

    Returns:
        The links; none at ``pp=1``.

    Raises:
        MeshError: If the mesh has stages but no groups for them.
    """

    def link(stage: int, group: ProcessGroup | None) -> StageLink:
        if group is None:
            raise MeshError("the mesh has no group for its stages.", rank=mesh.rank, axis="pp")
        peer = mesh.layout.stage_rank(mesh.rank, stage)
        return StageLink(peer, group, recorder, deadline, device=mesh.device)

    stage = mesh.pp_rank
    first, last = mesh.is_first_stage, mesh.is_last_stage
    return StageLinks(
        from_previous=None if first else link(stage - 1, mesh.pp_forward),
        to_previous=None if first else link(stage - 1, mesh.pp_backward),
        to_next=None if last else link(stage + 1, mesh.pp_forward),
        from_next=None if last else link(stage + 1, mesh.pp_backward),
    )
