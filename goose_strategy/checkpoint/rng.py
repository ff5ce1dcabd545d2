"""Random generators of every rank, so that a resumed run draws what an unbroken one would.

Lightning saves none: a resumed run with dropout differs from the first step on. States belong to
coordinates of the mesh, because tp ranks and stages draw different numbers on purpose. Streams that
a sharded model keeps beside the process's own generators are saved with them.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from goose_strategy.comm.collectives import all_gather_objects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from goose_strategy.mesh.mesh import ParallelMesh

RNG_KEY = "goose3d_rng"
"""Name under which the states are meant to be kept among a checkpoint's meta entries."""

_STREAMS = "streams"


class Stream(Protocol):
    """Random numbers that are drawn from something else than the process's generators."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as plain types."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state."""


def capture_rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, NumPy's and torch's generators as plain types.

    Args:
        device: The device whose generator is captured beside the CPU's.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators of this process to a captured state."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def gather_rng_states(mesh: ParallelMesh, streams: Sequence[Stream] = ()) -> dict[str, Any]:
    """Gather the states of all ranks; collective.

    Args:
        mesh: The ranks.
        streams: This rank's further streams.

    Returns:
        State per coordinates, of types that ``weights_only`` loads; equal on all ranks.
    """
    own = capture_rng_state(mesh.device)
    own[_STREAMS] = [stream.state_dict() for stream in streams]
    states = all_gather_objects(own, mesh.control)
    return {_place(mesh, rank): state for rank, state in enumerate(states)}


def scatter_rng_states(
    states: Mapping[str, Any], mesh: ParallelMesh, streams: Sequence[Stream] = ()
) -> bool:
    """Restore this rank's state from what `gather_rng_states` returned.

    Args:
        states: State per coordinates.
        mesh: The ranks; the decision needs no communication.
        streams: This rank's further streams, in the order in which they were gathered; those that
            the checkpoint does not know are left as they are.

    Returns:
        Whether it was restored. In another layout no rank's numbers can be continued; nothing is
        touched then.
    """
    places = {_place(mesh, rank) for rank in range(mesh.layout.world_size)}
    if places != set(states):
        return False
    own = states[_place(mesh, mesh.rank)]
    restore_rng_state(own, mesh.device)
    for stream, state in zip(streams, own.get(_STREAMS, ()), strict=False):
        stream.load_state_dict(state)
    return True


def _place(mesh: ParallelMesh, rank: int) -> str:
    at = mesh.layout.coordinates(rank)
    return f"pp{at.pp} dp{at.dp} tp{at.tp}"
