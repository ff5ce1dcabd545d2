"""Rank arithmetic: which global rank sits where in the pp x dp x tp mesh.

``torch.distributed.device_mesh`` does the same arithmetic, but only with process groups at hand.
Everything here is pure, so that plans, messages and tests can reason about a world of any size
without one. The order is fixed: ``rank = (pp_rank * dp + dp_rank) * tp + tp_rank``, so that the
ranks of a tp group, which talk most, are neighbours on one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from goose_strategy.errors import ConfigError, MeshError
from goose_strategy.mesh.axis import MeshAxis
from goose_strategy.validate import divisors, positive, whole


class Coordinates(NamedTuple):
    """Position of one rank on each axis."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class MeshLayout:
    """Sizes of the three axes and the arithmetic between ranks and coordinates.

    Args:
        tp: Number of tensor-parallel ranks.
        pp: Number of pipeline stages.
        dp: Number of data-parallel replicas.

    Raises:
        ConfigError: If a size is no whole number or smaller than 1.
    """

    tp: int
    pp: int
    dp: int

    def __post_init__(self) -> None:
        whole(tp=self.tp, pp=self.pp, dp=self.dp)
        positive(tp=self.tp, pp=self.pp, dp=self.dp)

    @classmethod
    def from_world(cls, world_size: int, *, tp: int, pp: int) -> MeshLayout:
        """Build the layout of ``world_size`` ranks; dp is what ``tp`` and ``pp`` leave.

        Args:
            world_size: Number of ranks in the world.
            tp: Number of tensor-parallel ranks.
            pp: Number of pipeline stages.

        Returns:
            The layout with ``dp = world_size / (tp * pp)``.

        Raises:
            ConfigError: If ``tp * pp`` does not divide ``world_size``; the message lists what does.
        """
        whole(world_size=world_size, tp=tp, pp=pp)
        positive(world_size=world_size, tp=tp, pp=pp)
        if world_size % (tp * pp):
            raise ConfigError(
                f"tp={tp} x pp={pp} = {tp * pp} does not divide world_size={world_size}; "
                + _what_would_work(world_size, tp, pp)
            )
        return cls(tp=tp, pp=pp, dp=world_size // (tp * pp))

    @property
    def world_size(self) -> int:
        """Number of ranks in the world."""
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Return where the global ``rank`` sits.

        Raises:
            MeshError: If there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank={rank} is not in this mesh; it has {self.world_size} ranks.")
        outer, tp_rank = divmod(rank, self.tp)
        pp_rank, dp_rank = divmod(outer, self.dp)
        return Coordinates(pp=pp_rank, dp=dp_rank, tp=tp_rank)

    def rank(self, coordinates: Coordinates) -> int:
        """Return the global rank at ``coordinates``.

        Raises:
            MeshError: If a coordinate lies outside its axis.
        """
        for axis, position in zip(MeshAxis, coordinates, strict=True):
            if not 0 <= position < self.size(axis):
                raise MeshError(
                    f"{axis}_rank={position} is not in this mesh; {axis} has {self.size(axis)} "
                    "positions.",
                    axis=axis,
                )
        pp_rank, dp_rank, tp_rank = coordinates
        return (pp_rank * self.dp + dp_rank) * self.tp + tp_rank

    def size(self, axis: MeshAxis) -> int:
        """Return the number of positions on ``axis``."""
        return {MeshAxis.PP: self.pp, MeshAxis.DP: self.dp, MeshAxis.TP: self.tp}[axis]

    def axis_ranks(self, rank: int, axis: MeshAxis) -> tuple[int, ...]:
        """Return the global ranks that differ from ``rank`` only on ``axis``, itself included."""
        here = self.coordinates(rank)._asdict()
        return tuple(
            self.rank(Coordinates(**{**here, str(axis): position}))
            for position in range(self.size(axis))
        )

    def axis_groups(self, axis: MeshAxis) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ``axis``, ordered by their first rank."""
        groups = {self.axis_ranks(rank, axis) for rank in range(self.world_size)}
        return tuple(sorted(groups))

    def model_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return, per dp rank, the ranks that together hold one replica of the model."""
        return tuple(
            tuple(r for r in range(self.world_size) if self.coordinates(r).dp == dp_rank)
            for dp_rank in range(self.dp)
        )

    def plane_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return, per tp rank, the ranks of all stages and replicas."""
        return tuple(
            tuple(r for r in range(self.world_size) if self.coordinates(r).tp == tp_rank)
            for tp_rank in range(self.tp)
        )

    def tie_groups(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs (first stage, last stage) that may hold copies of one tied weight.

        Empty without a pipeline: one rank holds both ends then.
        """
        if self.pp == 1:
            return ()
        return tuple(
            (self.rank(Coordinates(0, dp, tp)), self.rank(Coordinates(self.pp - 1, dp, tp)))
            for dp in range(self.dp)
            for tp in range(self.tp)
        )

    def stage_rank(self, rank: int, stage: int) -> int:
        """Return the global rank that runs ``stage`` in the pipeline of ``rank``."""
        return self.rank(self.coordinates(rank)._replace(pp=stage))


def _what_would_work(world_size: int, tp: int, pp: int) -> str:
    """Name the tp sizes that work with this pp, the pp sizes with this tp, and the worlds."""
    parts = []
    if world_size % pp == 0:
        sizes = ", ".join(str(size) for size in divisors(world_size // pp))
        parts.append(f"with pp={pp} choose tp from {sizes}")
    if world_size % tp == 0:
        sizes = ", ".join(str(size) for size in divisors(world_size // tp))
        parts.append(f"with tp={tp} choose pp from {sizes}")
    parts.append(f"start a multiple of {tp * pp} ranks")
    return "; or ".join(parts) + "."
