"""The names of the three parallel axes.

One enum instead of strings typed in forty places; a member is a plain ``str``, so it can name a
metric, a file or a ``DeviceMesh`` dimension directly.
"""

from __future__ import annotations

from enum import StrEnum


class MeshAxis(StrEnum):
    """One axis of the mesh of ranks."""

    PP = "pp"
    """Pipeline: each rank owns a contiguous run of layers (a stage)."""

    DP = "dp"
    """Data: each rank holds the same parameters and sees other samples; optimizer state is cut."""

    TP = "tp"
    """Tensor: each rank holds a slice of every large matrix and sees the same samples."""
