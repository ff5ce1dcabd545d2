"""The mesh of ranks as this rank sees it: where it sits, and a process group per purpose.

``DeviceMesh`` offers one group per dimension. A pipeline with ZeRO-1 needs more: a group for each
direction of the pipeline (so that the launch order on each communicator is the schedule's order),
the pair that holds a tied weight, one replica of the model, and a gloo group for objects. All are
made and warmed once, here, in the same order on every rank; an object passed down carries them, and
nothing is looked up from module globals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from goose_strategy.errors import MeshError
from goose_strategy.mesh.axis import MeshAxis
from goose_strategy.mesh.host import HostPeers, connect_host, disconnect_host
from goose_strategy.mesh.lane import LANES, backend_of, lane_for

if TYPE_CHECKING:
    from goose_strategy.mesh.layout import MeshLayout

DEVICE_MESH_NAMES = ("pipeline_parallel", "data_parallel", "tensor_parallel")
"""Dimension names of `ParallelMesh.device_mesh`, outermost first."""


class ParallelMesh:
    """Coordinates and process groups of this rank. Built by `ParallelMesh.create`.

    A group is ``None`` where it would have one member; every function of ``comm`` takes ``None``
    for "nothing to do". All groups of one axis exist side by side, and each rank sees its own.

    Attributes:
        layout: Sizes of the axes and the arithmetic between ranks.
        rank: Global rank.
        coordinates: Position on each axis.
        device: Device of the tensors that travel through the groups.
        tp: Ranks that hold the other slices of this rank's matrices.
        dp: Ranks that hold the same slices and see other samples.
        pp_forward: All stages of this pipeline; carries hidden states.
        pp_backward: The same ranks on their own communicator; carries gradients of hidden states.
        tie: First and last stage, if this rank is on one of them.
        model: All ranks of this replica of the model (pp x tp).
        world: All ranks.
        control: All ranks, always gloo: objects and verdicts, never on a device.
        model_control: The replica's ranks, always gloo.
        norms: The replica's ranks once more, for sums that run beside everything else; ``None``
            unless it was asked for.
    """

    def __init__(self, layout: MeshLayout, *, rank: int, device: torch.device) -> None:
        self.layout = layout
        self.rank = rank
        self.coordinates = layout.coordinates(rank)
        self.device = device
        self.tp: ProcessGroup | None = None
        self.dp: ProcessGroup | None = None
        self.pp_forward: ProcessGroup | None = None
        self.pp_backward: ProcessGroup | None = None
        self.tie: ProcessGroup | None = None
        self.model: ProcessGroup | None = None
        self.model_control: ProcessGroup | None = None
        self.norms: ProcessGroup | None = None
        self._world: ProcessGroup | None = None
        self._control: ProcessGroup | None = None
        self._alone: ProcessGroup | None = None
        self._owned: list[ProcessGroup] = []
        self._local: dict[ProcessGroup, HostPeers] = {}
        self._staged: list[ProcessGroup] = []

    @classmethod
    def create(
        cls,
        layout: MeshLayout,
        *,
        device: torch.device,
        timeout: timedelta,
        backend: str | None = None,
        shared_memory: bool = True,
        norms: bool = False,
    ) -> ParallelMesh:
        """Make all groups; collective over the world.

        Args:
            layout: Sizes of the axes.
            device: Device of the tensors that will travel through the groups.
            timeout: After how long an operation on one of the groups fails.
            backend: Backend of the groups other than the gloo ones; the default group's if
                ``None``.
            shared_memory: Let ranks on one machine exchange tensors through shared memory, if
                they are on CPUs, or on cards whose backend is gloo.
            norms: Make the group `norms`.

        Returns:
            The mesh as this rank sees it, with warmed communicators.

        Raises:
            MeshError: If there is no default process group, or it has another size.
        """
        if not dist.is_initialized():
            raise MeshError(
                "there is no default process group; call torch.distributed.init_process_group "
                "(or let Lightning launch the ranks) before the mesh is made."
            )
        if dist.get_world_size() != layout.world_size:
            raise MeshError(
                f"the layout tp={layout.tp} x pp={layout.pp} x dp={layout.dp} has "
                f"{layout.world_size} ranks, but the world has {dist.get_world_size()}."
            )
        mesh = cls(layout, rank=dist.get_rank(), device=device)
        mesh._make_groups(timeout, backend)
        if norms:
            # Not through shared memory, where a sum runs only when somebody waits for it.
            groups = layout.model_groups()
            mesh.norms = mesh._make(groups, purpose="norms", timeout=timeout, backend=backend)
        mesh._open_lane()
        mesh._warm()
        on_host = device.type == "cpu" or mesh._staged
        if shared_memory and on_host and layout.world_size > 1:
            mesh._connect(timeout)
        return mesh

    def _make_groups(self, timeout: timedelta, backend: str | None) -> None:
        layout = self.layout

        def make(
            groups: Iterable[tuple[int, ...]], purpose: str, of_backend: str | None = backend
        ) -> ProcessGroup | None:
            return self._make(groups, purpose=purpose, timeout=timeout, backend=of_backend)

        self.tp = make(layout.axis_groups(MeshAxis.TP), "tp")
        self.dp = make(layout.axis_groups(MeshAxis.DP), "dp")
        self.pp_forward = make(layout.axis_groups(MeshAxis.PP), "pp_forward")
        self.pp_backward = make(layout.axis_groups(MeshAxis.PP), "pp_backward")
        self.tie = make(layout.tie_groups(), "tie")
        self.model = make(layout.model_groups(), "model")
        self.model_control = make(layout.model_groups(), "model_control", "gloo")
        self._world = dist.group.WORLD
        self._control = make([tuple(range(layout.world_size))], "control", "gloo") or self._world

    def _make(
        self,
        groups: Iterable[tuple[int, ...]],
        *,
        purpose: str,
        timeout: timedelta,
        backend: str | None,
    ) -> ProcessGroup | None:
        """Make every group of one purpose and return the one this rank is in."""
        mine: ProcessGroup | None = None
        for ranks in groups:
            if len(ranks) == 1:
                continue
            group = dist.new_group(
                list(ranks), timeout=timeout, backend=backend, group_desc=f"goose_{purpose}"
            )
            if self.rank in ranks:
                mine = group
                self._owned.append(group)
        return mine

    def _open_lane(self) -> None:
        """Let what gloo does not carry of a card go through the host; see ``comm.staged``."""
        lane = lane_for(self.device)
        if lane is None:
            return
        groups = [g for g in (*self._owned, self.world) if not self._is_control(g)]
        self._staged = [g for g in groups if backend_of(g, self.device) == "gloo"]
        LANES.update(dict.fromkeys(self._staged, lane))

    def _is_control(self, group: ProcessGroup) -> bool:
        return group in (self.control, self.model_control) and group is not self.world

    def _warm(self) -> None:
        """Open every communicator now, outside of any schedule, in the same order everywhere."""
        host = torch.device("cpu")
        for group in self._owned:
            on_host = self._is_control(group) or group in LANES
            dist.all_reduce(torch.zeros(1, device=host if on_host else self.device), group=group)

    def _connect(self, timeout: timedelta) -> None:
        """Open shared memory between ranks of one machine; collective over the world."""
        groups = {
            "tp": self.tp,
            "dp": self.dp,
            "pp_forward": self.pp_forward,
            "pp_backward": self.pp_backward,
            "tie": self.tie,
            "model": self.model,
            "model_control": self.model_control,
            "world": self.world,
            "control": self.control,
        }
        self._local = connect_host(groups, control=self.control, timeout=timeout)

    @property
    def world(self) -> ProcessGroup:
        """All ranks; never ``None``."""
        return self._alive(self._world)

    @property
    def control(self) -> ProcessGroup:
        """All ranks over gloo; never ``None``."""
        return self._alive(self._control)

    def _alive(self, group: ProcessGroup | None) -> ProcessGroup:
        if group is None:
            raise MeshError("the mesh is closed.", rank=self.rank)
        return group

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.layout.tp

    @property
    def tp_rank(self) -> int:
        """Position on the tp axis."""
        return self.coordinates.tp

    @property
    def pp_size(self) -> int:
        """Number of pipeline stages."""
        return self.layout.pp

    @property
    def pp_rank(self) -> int:
        """Position on the pp axis: this rank's stage."""
        return self.coordinates.pp

    @property
    def dp_size(self) -> int:
        """Number of data-parallel replicas."""
        return self.layout.dp

    @property
    def dp_rank(self) -> int:
        """Position on the dp axis."""
        return self.coordinates.dp

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank runs the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp_rank == self.pp_size - 1

    def describe(self) -> str:
        """Return one line for messages, e.g. ``rank 5 (pp 1, dp 0, tp 1)``."""
        at = self.coordinates
        return f"rank {self.rank} (pp {at.pp}, dp {at.dp}, tp {at.tp})"

    def device_mesh(self) -> DeviceMesh:
        """Return the same mesh as torch's class, over the groups that exist already.

        An axis of size 1 gets a group of this rank alone, which needs no other rank to be made.

        Returns:
            A mesh ``[pp, dp, tp]`` with dimensions named `DEVICE_MESH_NAMES`.
        """
        layout = self.layout
        groups = [group or self._lonely() for group in (self.pp_forward, self.dp, self.tp)]
        ranks = torch.arange(layout.world_size).view(layout.pp, layout.dp, layout.tp)
        return DeviceMesh.from_group(
            groups, self.device.type, mesh=ranks, mesh_dim_names=DEVICE_MESH_NAMES
        )

    def _lonely(self) -> ProcessGroup:
        if self._alone is None:
            self._alone = dist.new_group(
                [self.rank], use_local_synchronization=True, group_desc="goose_alone"
            )
            self._owned.append(self._alone)
        return self._alone

    def close(self) -> None:
        """Destroy the groups that this mesh made; the default group is left alone. Idempotent."""
        owned, self._owned = self._owned, []
        disconnect_host(self._local)
        for group in self._staged:
            LANES.pop(group, None)
        self._local, self._staged = {}, []
        self.tp = self.dp = self.pp_forward = self.pp_backward = self.tie = None
        self.model = self.model_control = self._alone = self._control = self._world = None
        self.norms = None
        if not dist.is_initialized():
            return
        for group in reversed(owned):
            # A peer that destroyed the default group first took this one with it.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)
