"""Gaussian noise that is keyed by parameter, step and element, so that every rank can make its own.

Opacus draws noise of every parameter's whole shape on one rank (or on each, scaled down). Here the
noise of an element is a function of a secret root, the step, the parameter's name, the tp slice and
the element's number: the rank that owns a slice makes the noise of that slice alone, tp replicas
and copies of a tied weight get the same numbers, and neither dp nor pp changes one of them.

    elements/s on one core: Philox (numpy, fp32) 97 million; AES-256 in counter mode (OpenSSL) with
    53-bit uniforms in fp64, four numbers for each element as ``secure`` takes them, 32 million.
    randomgen's AESCounter makes 110 million single numbers, in a package that promises no secrecy.
"""

from __future__ import annotations

import hashlib
import os
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

BLOCK = 2**14
"""Elements that are made together: whoever needs one of them makes all."""

ROOT_BYTES = 32


def fresh_root() -> bytes:
    """Return a secret key from the operating system, whatever anybody has seeded."""
    return os.urandom(ROOT_BYTES)


def root_from(seed: int) -> bytes:
    """Return a key that everybody knows who knows the seed; for tests."""
    return hashlib.blake2b(f"seed {seed}".encode(), digest_size=ROOT_BYTES).digest()


class Source(Protocol):
    """Makes normal numbers from a key."""

    def normals(self, key: bytes, like: Tensor) -> Tensor:
        """Return ``[BLOCK]`` numbers of the type and device of ``like``."""


class FastSource:
    """Philox: counter-based and statistically sound, but not made to keep a secret."""

    def normals(self, key: bytes, like: Tensor) -> Tensor:
        """See `Source`."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if like.device.type != "cpu":
            generator = torch.Generator(like.device)
            generator.manual_seed(int.from_bytes(key[:8], "little") >> 1)
            return torch.randn(BLOCK, generator=generator, device=like.device, dtype=dtype)
        # torch's generator on the CPU takes 32 bits of a seed, so that blocks would soon repeat.
        philox = np.random.Philox(key=int.from_bytes(key[:16], "little"))
        narrow = np.float64 if dtype == torch.float64 else np.float32
        drawn = np.random.Generator(philox).standard_normal(BLOCK, dtype=narrow)
        normals: Tensor = torch.from_numpy(drawn)
        return normals


class SecureSource:
    """AES-256 in counter mode, and sums of four numbers.

    One number of 53 bits, scaled, leaves gaps that may tell the value it was added to. In sums of
    several they are much harder to find (Holohan and Braghin 2021, arXiv:2107.10138), which is what
    Opacus does, too; noise in floating point closes none of them for certain.
    """

    TERMS = 4

    def normals(self, key: bytes, like: Tensor) -> Tensor:
        """See `Source`; the numbers are fp64."""
        # Installed with the extra "privacy".
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        cipher = Cipher(algorithms.AES(key[:32]), modes.CTR(bytes(16))).encryptor()
        stream = cipher.update(bytes(8 * BLOCK * self.TERMS))
        bits = np.frombuffer(stream, dtype=np.uint64) >> np.uint64(11)
        uniform = torch.from_numpy((bits.astype(np.float64) + 0.5) * 2.0**-53)
        radius, angle = uniform.view(2, self.TERMS // 2, BLOCK)
        radius = torch.sqrt(-2 * torch.log(radius))
        angle = angle * (2 * torch.pi)
        total = (radius * torch.cos(angle) + radius * torch.sin(angle)).sum(0)
        normals: Tensor = (total / self.TERMS**0.5).to(like.device)
        return normals


class Noise:
    """Standard normal noise for every element of every parameter.

    Args:
        root: A secret, equal on all ranks.
        secure: Use `SecureSource`.
    """

    def __init__(self, root: bytes, *, secure: bool = False) -> None:
        self._root = root
        self._source: Source = SecureSource() if secure else FastSource()

    def __repr__(self) -> str:
        """Name the source; never the root."""
        return f"Noise({type(self._source).__name__})"

    def add(self, target: Tensor, scale: float, *, name: str, step: int, start: int) -> None:
        """Add noise to a range of a flattened parameter's gradient, in place.

        Args:
            target: ``[n]``, fp32 or fp64.
            scale: Standard deviation.
            name: Name of the parameter, with the slice of tp if it is cut.
            step: Number of the step.
            start: Number of the first element in the parameter.
        """
        stop = start + target.numel()
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            first, last = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
            drawn = self._source.normals(self._key(name, step, block), target)
            part = drawn[first - block * BLOCK : last - block * BLOCK]
            piece = target[first - start : last - start]
            # In the wider of both types: the sum is rounded, not the noise.
            piece.copy_(piece.to(part.dtype) + part * scale)

    def _key(self, name: str, step: int, block: int) -> bytes:
        text = f"{step}|{block}|{name}".encode()
        return hashlib.blake2b(text, key=self._root, digest_size=32).digest()
