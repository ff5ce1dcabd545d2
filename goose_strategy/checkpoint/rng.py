"""Random generators of every rank, so that a resumed run draws what an unbroken one would.

Lightning saves none: a resumed run with dropout differs from the first step on. States belong to
coordinates of the mesh, because tp ranks and stages draw different numbers on purpose.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from goose_strategy.comm.collectives import all_gather_objects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goose_strategy.mesh.mesh import ParallelMesh

RNG_KEY = "goose3d_rng"
"""Name under which the states are meant to be kept among a checkpoint's meta entries."""


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


def gather_rng_states(mesh: ParallelMesh) -> dict[str, Any]:
    """Gather the states of all ranks; collective.

    Returns:
        State per coordinates, of types that ``weights_only`` loads; equal on all ranks.
    """
    states = all_gather_objects(capture_rng_state(mesh.device), mesh.control)
    return {_place(mesh, rank): state for rank, state in enumerate(states)}


def scatter_rng_states(states: Mapping[str, Any], mesh: ParallelMesh) -> bool:
    """Restore this rank's state from what `gather_rng_states` returned.

    Args:
        states: State per coordinates.
        mesh: The ranks; the decision needs no communication.

    Returns:
        Whether it was restored. In another layout no rank's numbers can be continued; nothing is
        touched then.
    """
    places = {_place(mesh, rank) for rank in range(mesh.layout.world_size)}
    if places != set(states):
        return False
    restore_rng_state(states[_place(mesh, mesh.rank)], mesh.device)
    return True


def _place(mesh: ParallelMesh, rank: int) -> str:
    at = mesh.layout.coordinates(rank)
    return f"pp{at.pp} dp{at.dp} tp{at.tp}"
