"""The messages between a rank's stages and those of other ranks."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from goose_strategy.comm.p2p import Metas, StageLink
from goose_strategy.errors import MeshError, ScheduleError
from goose_strategy.pipeline_parallel.tables.chunks import Chunks

if TYPE_CHECKING:
    from goose_strategy.comm.recorder import Recorder
    from goose_strategy.mesh.mesh import ParallelMesh


class Sent(Protocol):
    """A message under way to another rank."""

    def wait(self) -> None:
        """Wait until its tensors may be freed."""


class Expected(Protocol):
    """A message to come."""

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for it and return its tensors."""


class Link(Protocol):
    """Messages to and from one rank; :class:`~goose_strategy.comm.p2p.StageLink` is one."""

    def send(self, tensors: Sequence[Tensor], *, key: Hashable = None) -> Sent:
        """Start to send."""

    def receive(self, *, key: Hashable, expected: Metas | None = None) -> Expected:
        """Post a receive."""


@dataclass(frozen=True)
class StageLinks:
    """The links of one rank, by the boundary that a message crosses.

    Hidden states and their gradients use communicators of their own, so that neither waits for
    the other's turn.

    Attributes:
        forwards: By the stage before the boundary, the link that carries hidden states over it.
        backwards: The same for their gradients.
    """

    forwards: Mapping[int, Link] = field(default_factory=dict)
    backwards: Mapping[int, Link] = field(default_factory=dict)

    def forward(self, stage: int) -> Link:
        """Return the link between ``stage`` and the next one, for hidden states."""
        return _found(self.forwards, stage)

    def backward(self, stage: int) -> Link:
        """Return the link between ``stage`` and the next one, for gradients."""
        return _found(self.backwards, stage)


def _found(links: Mapping[int, Link], stage: int) -> Link:
    link = links.get(stage)
    if link is None:
        raise ScheduleError("the schedule has a message where no other rank is.", stage=stage)
    return link


def connect_stages(
    mesh: ParallelMesh,
    chunks: Chunks | None = None,
    *,
    recorder: Recorder | None = None,
    deadline: timedelta | None = None,
) -> StageLinks:
    """Make the links of this rank to those that hold its stages' neighbours.

    Args:
        mesh: The mesh.
        chunks: Which rank holds which stages; one stage per rank if ``None``.
        recorder: Records the launches.
        deadline: How long a wait may last; the groups' own timeout if ``None``.

    Returns:
        The links; none at ``pp=1``.

    Raises:
        MeshError: If the mesh has several ranks on the pipeline axis but no groups for them.
    """
    chunks = chunks or Chunks(mesh.pp_size)
    known: dict[tuple[str, int], StageLink] = {}

    def link(peer: int, way: str, group: ProcessGroup | None) -> StageLink:
        if group is None:
            raise MeshError("the mesh has no group for its stages.", rank=mesh.rank, axis="pp")
        if (way, peer) not in known:
            rank = mesh.layout.stage_rank(mesh.rank, peer)
            known[way, peer] = StageLink(rank, group, recorder, deadline, device=mesh.device)
        return known[way, peer]

    forwards: dict[int, Link] = {}
    backwards: dict[int, Link] = {}
    for stage in range(chunks.stages - 1):
        ends = {chunks.rank_of(stage), chunks.rank_of(stage + 1)}
        if mesh.pp_rank in ends and len(ends) == 2:
            (peer,) = ends - {mesh.pp_rank}
            forwards[stage] = link(peer, "F", mesh.pp_forward)
            backwards[stage] = link(peer, "B", mesh.pp_backward)
    return StageLinks(forwards, backwards)
