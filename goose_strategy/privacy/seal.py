"""Whether anybody touched clipped sums before they had their noise.

The noise is chosen for sums in which no sample is larger than the norm. Whoever scales them between
the backward and the step (a clipping by hand, a hook) makes some larger, and whoever reads them
there reads what no noise covers. Opacus checks neither.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from goose_strategy.compat.torch import hooks_of, version_of
from goose_strategy.errors import PrivacyError

if TYPE_CHECKING:
    from goose_strategy.data_parallel.bucket import Bucket


class Seal:
    """Remembers the state of gradients when they were released."""

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}

    def close(self, buckets: Iterable[Bucket]) -> None:
        """Note what the gradients are now."""
        self._versions = {id(bucket): version_of(bucket.grads.flat) for bucket in buckets}

    def check(self, buckets: Iterable[Bucket]) -> None:
        """Check that they are the same still. A gradient that was dropped is as good: noise alone.

        Raises:
            PrivacyError: If one was written to, or another tensor was put in its place.
        """
        for bucket in buckets:
            if self._versions.get(id(bucket)) == version_of(bucket.grads.flat):
                continue
            names = [slot.name for slot in bucket.slots]
            raise PrivacyError(
                f"the gradients of {names[0]} or of one of {len(names) - 1} others were written to "
                "between the backward and optimizer.step() (clip_grad_norm_, a loop over p.grad, "
                "zero_grad(set_to_none=False)), so that a sample's part may be larger than the "
                "noise covers. Leave them alone until the step; every sample is clipped already."
            )


def refuse_hooks(named: Mapping[str, Tensor]) -> None:
    """Refuse hooks of others on parameters' gradients, which could change them or read them.

    Args:
        named: Trainable parameters by name.

    Raises:
        PrivacyError: Naming the first of them.
    """
    for name, param in named.items():
        for hook in hooks_of(param):
            plain = hook.func if isinstance(hook, functools.partial) else hook
            if getattr(plain, "__module__", "").partition(".")[0] == __name__.partition(".")[0]:
                continue
            raise PrivacyError(
                f"{name} has a hook ({getattr(plain, '__qualname__', plain)!s}, by register_hook "
                "or register_post_accumulate_grad_hook) that gets its gradient before it has its "
                "noise, and may change it; remove the hook."
            )
