"""The random generators of this process, whose state can be put aside and taken up again.

torch has a generator per device and functions for each of them. What draws on several (dropout on
the device, a coin on the CPU) has to be moved to another stream of numbers as a whole, or half of
it repeats what another rank has drawn.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import torch
from torch import Tensor

State: TypeAlias = dict[str, Tensor]
"""State of each generator by the type of its device: a uint8 tensor on the CPU."""


class Generators:
    """torch's default generators of the CPU and, if it is another, of one device.

    Args:
        device: The device of a rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        # Turns a seed into a state; torch.manual_seed would reach all devices of the machine.
        self._scratch = torch.Generator(device) if self._on_cuda else None

    def capture(self) -> State:
        """Return the present state."""
        state = {"cpu": torch.get_rng_state()}
        if self._on_cuda:
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def restore(self, state: State) -> None:
        """Go on from a state that was captured; a device that it does not know is left alone."""
        torch.set_rng_state(state["cpu"])
        if self._on_cuda and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)

    def seed(self, seed: int) -> State:
        """Go on from a seed, in ``[0, 2**63)``; return the state that this is."""
        torch.default_generator.manual_seed(seed)
        if self._scratch is not None:
            self._scratch.manual_seed(seed)
            torch.cuda.set_rng_state(self._scratch.get_state(), self._device)
        return self.capture()

    def advance(self, kinds: set[str]) -> None:
        """Draw one number from each of the generators named by the type of their device."""
        for kind in sorted(kinds):
            torch.rand((), device=self._device if kind == self._device.type else kind)


def changed(before: State, after: State) -> set[str]:
    """Return the types of the devices whose generators drew between two states."""
    return {kind for kind, state in after.items() if not torch.equal(before[kind], state)}


def fingerprint(state: State, *parts: object) -> int:
    """Return a number in ``[0, 2**62)`` that depends on every bit of a state, and on ``parts``."""
    digest = hashlib.sha256(repr(parts).encode())
    for kind in sorted(state):
        digest.update(state[kind].numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> 2
