"""``python -m cuda_ops.info``: what runs the optimizer's step on each device here, and why."""

from __future__ import annotations

import platform
import sys

import torch

from cuda_ops.build import find_cxx, find_nvcc
from cuda_ops.load import examine
from cuda_ops.sources import MODE_VARIABLE, folders, mode, source_hash


def report() -> list[str]:
    """Return the lines of the report."""
    lines = [
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}",
        f"{MODE_VARIABLE}={mode()}, sources {source_hash()}",
        f"C++ compiler: {find_cxx() or 'none'}",
        f"nvcc: {find_nvcc() or 'none'}",
        "libraries are searched in: " + ", ".join(str(folder) for folder in folders()),
    ]
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        library, why = examine(device)
        lines.append(f"{device}: {'compiled' if library else 'pure torch'} ({why})")
    if len(devices) == 1:
        lines.append("cuda: no card is visible to torch")
    return lines


def main() -> int:
    """Print the report; returns the exit code."""
    sys.stdout.write("\n".join(report()) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
