"""The one list of sources and flags, and where built libraries lie.

A library's name carries a hash of what it was built from, so that a stale or foreign one is never
loaded: after a change of the sources it is not found. Nothing here needs torch or a compiler.
"""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
CSRC = FOLDER / "csrc"

KINDS = ("cpu", "cuda")

CXX_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
"""Every operation is rounded by itself; without traps and errno, selects and roots vectorize."""

NVCC_FLAGS = ("-std=c++17", "-O3", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false")

INSTRUCTION_SETS = {
    "table_baseline": (),
    "table_v3": ("-march=x86-64-v3",),
    "table_v4": ("-march=x86-64-v4", "-mprefer-vector-width=512"),
}
"""The CPU loops are compiled once for each; elsewhere than on x86-64 only the first one."""

DEFAULT_ARCHS = ("80", "90", "100")

MODE_VARIABLE = "CUDA_OPS"
MODES = ("auto", "cpu", "cuda", "off")


def mode() -> str:
    """Return what ``CUDA_OPS`` asks for: which libraries are built, and which are used.

    Raises:
        ValueError: If it is none of the allowed values.
    """
    value = os.environ.get(MODE_VARIABLE, "auto").lower()
    if value not in MODES:
        raise ValueError(f"{MODE_VARIABLE}={value}: allowed are {', '.join(MODES)}")
    return value


@cache
def source_hash() -> str:
    """Return a short hash over the sources and flags."""
    digest = hashlib.sha256(repr((CXX_FLAGS, NVCC_FLAGS, INSTRUCTION_SETS)).encode())
    for path in sorted(CSRC.iterdir()):
        if path.suffix in (".h", ".cuh", ".cu", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def library_name(kind: str) -> str:
    """Return the file name of a library that fits the sources and this machine."""
    return f"libgoose_{kind}-{platform.machine()}-{source_hash()}.so"


def folders() -> tuple[Path, ...]:
    """Return where libraries are searched: beside the package, then in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return FOLDER / "lib", Path(root) / "goose3d" / "cuda_ops"


def find_library(kind: str) -> Path | None:
    """Return the built library of a kind, if there is one for these sources and this machine."""
    for folder in folders():
        path = folder / library_name(kind)
        if path.is_file():
            return path
    return None
