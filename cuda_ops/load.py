"""Finds the compiled library for a device, once, and falls back to pure torch with one message.

A broken library must not stop a training run: whatever is wrong (nothing built, another
architecture, a driver older than the CUDA runtime inside), pure torch gives the same bits.
"""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

from cuda_ops.bindings import Library, LibraryError
from cuda_ops.sources import find_library, mode

_COMMAND = "python -m cuda_ops.build"
_log = logging.getLogger("cuda_ops")


@cache
def library_for(device: torch.device) -> Library | None:
    """Return the library that runs on a device, or ``None`` where pure torch does.

    The first call for a device loads the library, launches an empty kernel on it, and says in one
    line of the log why there is none.
    """
    library, why = examine(device)
    if library is None and mode() != "off" and _speaks():
        _log.warning(
            "no compiled optimizer ops on %s (%s); pure torch runs: same results, but slower",
            device.type,
            why,
        )
    return library


def examine(device: torch.device) -> tuple[Library | None, str]:
    """Return the library for a device, and in words what was found.

    Args:
        device: Where the shards lie.
    """
    kind = device.type
    wanted = mode()
    if wanted == "off" or kind not in ("cpu", "cuda"):
        return None, f"CUDA_OPS={wanted}" if wanted == "off" else f"no library for {kind}"
    if wanted == "cpu" and kind == "cuda":
        return None, "CUDA_OPS=cpu"
    path = find_library(kind)
    if path is None:
        return None, f"none is built for these sources: {_COMMAND} --only {kind}"
    try:
        library = Library(path)
    except (OSError, LibraryError) as error:
        return None, f"{error}; {_COMMAND} --only {kind} --force"
    trouble = library.probe(device.index or 0)
    if trouble is not None:
        return None, f"{path.name}, built for {library.built_for}, does not run here: {trouble}"
    return library, f"{path}, built for {library.built_for}"


def _speaks() -> bool:
    """One rank is enough."""
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
