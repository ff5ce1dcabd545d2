"""Seeds that follow the mesh.

Ranks that must draw the same numbers (the dp replicas when a weight is initialised) share a seed,
ranks that must not (the tp slices of one matrix, the stages) get their own. Lightning's
``seed_everything`` knows the global rank only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import TYPE_CHECKING

from goose_strategy.mesh.axis import MeshAxis

if TYPE_CHECKING:
    from goose_strategy.mesh.layout import Coordinates


def axis_seed(
    base: int, coordinates: Coordinates, *, same_over: Collection[MeshAxis] = (MeshAxis.DP,)
) -> int:
    """Derive this rank's seed.

    Args:
        base: The run's seed.
        coordinates: Where the rank sits (``mesh.coordinates``).
        same_over: Axes along which all ranks get the same seed.

    Returns:
        A seed in ``[0, 2**32)``, the range that NumPy takes; it is ``base`` itself where the rank
        is the first on every axis not in ``same_over``, so that one process draws what it drew
        without a mesh.
    """
    place = {
        axis.value: position
        for axis, position in zip(MeshAxis, coordinates, strict=True)
        if axis not in same_over and position
    }
    if not place:
        return base
    digest = hashlib.sha256(repr((base, sorted(place.items()))).encode()).digest()
    return int.from_bytes(digest[:4], "little")
