"""Weight gradients as their own action: what is left of a backward that was split in two.

``torch.distributed.pipelining`` splits a backward by walking the graph in Python, twice per
microbatch, and computes checkpointed layers again for the second half. Here the backward of a layer
hands what its weights' gradients are made of to a `WeightGradStore`, and somebody computes them
later:

    with store.collecting():                        # I: input gradients only
        torch.autograd.backward(edges, gradients)
    work = store.take()
    ...
    work.run()                                      # W: the weights' gradients, accumulated

Outside of ``collecting()`` the same layers accumulate as usual. Which layers take part is decided
above this room (`goose_strategy.tensor_parallel.defer`); how they compute is in `products`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from goose_strategy.compat.torch import quiet_hooks

TOGETHER = 2**18
"""Elements of gradients after which they are accumulated: few enough to hold, many per call."""


class Owed(Protocol):
    """Gradients of one layer that have not been computed yet.

    Attributes:
        parameters: The leaves whose gradients these are.
        held: The tensors of which they are made.
    """

    @property
    def parameters(self) -> Sequence[Tensor]: ...  # noqa: D102 - see the class

    @property
    def held(self) -> Sequence[Tensor]: ...  # noqa: D102

    def compute(self) -> Sequence[Tensor]:
        """Return the gradients of `parameters`, each in its shape."""
        ...


class WeightGradWork:
    """The weight gradients of one backward, to be computed once.

    They are accumulated by a backward from the parameters themselves, so that hooks, ``p.grad`` and
    ``p.grad_dtype`` are served as by any backward. Dropping the work drops them.

    Args:
        owed: What the layers pushed, in their order.
    """

    __slots__ = ("_owed",)

    def __init__(self, owed: list[Owed]) -> None:
        self._owed: list[Owed] | None = owed

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are held until `run`, each storage counted once."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for owed in self._owed or ()
            for storage in (tensor.untyped_storage() for tensor in owed.held)
        }
        return sum(storages.values())

    def __len__(self) -> int:
        return len(self._owed or ())

    def run(self) -> None:
        """Compute and accumulate, a few layers at a time, freeing what they held.

        A parameter that several layers pushed (a tied weight) gets one sum, as in one backward.

        Raises:
            RuntimeError: If it ran before.
        """
        owed, self._owed = self._owed, None
        if owed is None:
            raise RuntimeError("the weight gradients of one backward were asked for a second time")
        left = Counter(id(param) for one in owed for param in one.parameters)
        shared: dict[int, list[Tensor]] = {}
        owed.reverse()
        while owed:
            parameters: list[Tensor] = []
            gradients: list[Tensor] = []
            while owed and sum(gradient.numel() for gradient in gradients) < TOGETHER:
                for param, gradient in _computed(owed.pop()):
                    key = id(param)
                    parts = [*shared.pop(key, ()), gradient]
                    left[key] -= 1
                    if left[key]:
                        shared[key] = parts
                        continue
                    # Autograd sums what goes into one leaf before it accumulates.
                    parameters += [param] * len(parts)
                    gradients += parts
            if parameters:
                torch.autograd.backward(parameters, gradients)


def _computed(owed: Owed) -> list[tuple[Tensor, Tensor]]:
    with torch.no_grad():
        return list(zip(owed.parameters, owed.compute(), strict=True))


class WeightGradStore:
    """Where layers leave their weights' gradients while input gradients are computed.

    One per model. What was pushed in one block belongs to one backward and is taken before the
    next one begins, so that the work of two microbatches cannot be mixed.

    Attributes:
        active: Whether layers push now.
    """

    __slots__ = ("_owed", "active")

    def __init__(self) -> None:
        self.active = False
        self._owed: list[Owed] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Let backwards inside of the block leave out the weights' gradients.

        If the block raises, what was pushed is dropped.

        Raises:
            RuntimeError: If such a block is open, or the last one's gradients were not taken.
        """
        if self.active or self._owed:
            what = "is open" if self.active else f"left {len(self._owed)} layers' that nobody took"
            raise RuntimeError(f"weight gradients cannot be collected: another block {what}")
        self.active = True
        try:
            yield
        except BaseException:
            self._owed = []
            raise
        finally:
            self.active = False

    def push(self, owed: Owed) -> None:
        """Keep gradients for later.

        Raises:
            RuntimeError: Outside of `collecting`.
        """
        if not self.active:
            raise RuntimeError("weight gradients were pushed while none are collected")
        # Autograd goes on to the parameters, and would call their hooks without a gradient.
        for param in owed.parameters:
            quiet_hooks(param)
        self._owed.append(owed)

    def take(self) -> WeightGradWork:
        """Return what the last block collected, maybe nothing.

        Raises:
            RuntimeError: If the block is still open.
        """
        if self.active:
            raise RuntimeError("weight gradients were taken while they are collected")
        owed, self._owed = self._owed, []
        return WeightGradWork(owed)
