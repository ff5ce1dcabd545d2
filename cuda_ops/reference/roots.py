"""Square roots as IEEE 754 defines them.

``torch.sqrt`` on the CPU takes a vector library's root, which is off by one in the last place for
one value in five (fp32) or in seventy (fp64). A step with it would not repeat on another device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SPLITTER = 2.0**27 + 1


def root32(values: Tensor) -> Tensor:
    """Return the correctly rounded roots of fp32 values: in fp64 no root is near a tie of fp32."""
    return values.to(torch.float64).sqrt().to(torch.float32)


def root64(values: Tensor) -> Tensor:
    """Return the correctly rounded roots of fp64 values below 1e299.

    One Newton step with the exact residual, by Dekker's product.
    """
    root = values.sqrt()
    carried = root * _SPLITTER
    high = carried - (carried - root)
    low = root - high
    square = root * root
    error = ((high * high - square) + 2.0 * high * low) + low * low
    better = root + ((values - square) - error) / (2.0 * root)
    return torch.where((root > 0) & root.isfinite(), better, root)
