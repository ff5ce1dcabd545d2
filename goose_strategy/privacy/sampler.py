"""Poisson sampling of a logical batch, drawn once for the whole mesh.

Opacus lets each dp rank draw from its own part of the data, so that their numbers of samples, and
of microbatches, differ; and with one seed on all ranks their draws are the same. Here every rank
makes the same draw over the whole data set from a shared secret, and takes its share of the drawn
samples: the same mechanism, with equally many microbatches on every replica. What is left over is
filled up with rows that count as nothing; they are marked in the batch (`MASK`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, Sampler

from goose_strategy.errors import BatchError, ConfigError
from goose_strategy.privacy.clipping import MASK

Drawn = tuple[int, int]
"""Number of a sample and the mark that its row gets: the draw's number from 1, or 0 to fill up."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """How batches are drawn.

    Attributes:
        size: Samples in the data set.
        rate: Probability of each of them, ``q``.
        most: Most samples of a draw, or ``None``.
        root: A secret, equal on all ranks.
        replicas: Number of data parallel replicas.
        replica: This one's number.
        multiple: Rows of a replica's batch are a multiple of this.
    """

    size: int
    rate: float
    most: int | None
    root: bytes = field(repr=False)
    replicas: int
    replica: int
    multiple: int

    def samples(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the samples of a draw, on every rank the same.

        Args:
            number: Of the draw, from 1.
        """
        key = hashlib.blake2b(f"draw|{number}".encode(), key=self.root, digest_size=16).digest()
        philox = np.random.Philox(key=int.from_bytes(key, "little"))
        generator = np.random.Generator(philox)
        found = np.flatnonzero(generator.random(self.size) < self.rate)
        if self.most is not None and len(found) > self.most:
            found = np.sort(generator.permutation(found)[: self.most])
        return found

    def rows(self, number: int) -> list[Drawn]:
        """Return this replica's rows of a draw; all replicas have equally many, at least one."""
        found = self.samples(number)
        share = self.replicas * self.multiple
        rows = max(1, -(-len(found) // share)) * self.multiple
        mine = [(int(sample), number) for sample in found[self.replica :: self.replicas]]
        return mine + [(0, 0)] * (rows - len(mine))


class PoissonSampler(Sampler[list[Drawn]]):
    """Batches of one replica, as a ``batch_sampler``.

    Args:
        draw: How they are drawn.
        start: Number of draws made before.
        counts: Where the number of samples of each draw is noted, by the draw's number.
    """

    def __init__(self, draw: Draw, start: int = 0, counts: dict[int, int] | None = None) -> None:
        self.draw = draw
        self.number = start
        self._counts = {} if counts is None else counts

    def __len__(self) -> int:
        """Number of batches in which a sample is expected once."""
        return max(1, round(1 / self.draw.rate))

    def __iter__(self) -> Iterator[list[Drawn]]:
        """Draw on where the last pass has stopped: no draw is made twice."""
        for _ in range(len(self)):
            self.number += 1
            rows = self.draw.rows(self.number)
            self._counts[self.number] = sum(mark > 0 for _, mark in rows)
            yield rows


class MarkedSamples(Dataset[tuple[Any, int]]):
    """A data set whose samples carry the mark of their row.

    Args:
        dataset: The user's.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.dataset)

    def __getitem__(self, drawn: Drawn) -> tuple[Any, int]:
        """Return a sample and its mark."""
        number, mark = drawn
        return self.dataset[number], mark


class MarkedCollate:
    """Collates samples as the user wants, and adds `MASK`.

    Args:
        collate: The user's function.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, marked: Sequence[tuple[Any, int]]) -> dict[str, Any]:
        """Return the batch.

        Raises:
            BatchError: If it is no mapping, or a tensor has not one row per sample.
        """
        batch = self.collate([sample for sample, _ in marked])
        if not isinstance(batch, Mapping):
            raise BatchError(
                f"private training needs batches that are a dict with {MASK} in it, but the loader "
                f"makes a {type(batch).__name__}; let collate_fn return a dict."
            )
        rows = len(marked)
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and (value.dim() == 0 or value.shape[0] != rows):
                raise BatchError(
                    f"{name} has shape {tuple(value.shape)}, but {rows} samples were drawn; "
                    "collate_fn must make one row of each sample, in their order."
                )
        return {**batch, MASK: torch.tensor([mark for _, mark in marked])}


def is_shuffled(loader: Any) -> bool:
    """Tell whether a loader is for training: whether it draws its samples at random.

    Args:
        loader: Any loader, maybe with Lightning's distributed sampler in it.
    """
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    return isinstance(sampler, RandomSampler)


def check_loader(loader: Any) -> None:
    """Check that the samples of a loader can be drawn by Poisson sampling.

    Raises:
        ConfigError: Naming what stands against it.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"{type(loader).__name__} over {type(dataset).__name__}: private training draws "
            "samples by their number, which needs a torch DataLoader over a data set with "
            "__getitem__ and __len__; or set sampling='none', and no epsilon is known."
        )
    sampler = loader.sampler
    if type(sampler) not in (RandomSampler, DistributedSampler):
        raise ConfigError(
            f"sampler={type(sampler).__name__} breaks Poisson sampling, in which every sample is "
            "drawn by itself; pass DataLoader(dataset, shuffle=True) without it, or set "
            "sampling='none'."
        )
    if isinstance(sampler, RandomSampler) and sampler.replacement:
        raise ConfigError(
            "sampler=RandomSampler(replacement=True) breaks Poisson sampling; pass shuffle=True."
        )


def poisson_loader(
    loader: DataLoader[Any], draw: Draw, start: int = 0, counts: dict[int, int] | None = None
) -> DataLoader[Any]:
    """Return a loader over the same data whose batches are drawn by Poisson sampling.

    Args:
        loader: The user's, checked by `check_loader`.
        draw: How.
        start: Number of draws made before.
        counts: See `PoissonSampler`.
    """
    workers = loader.num_workers
    extra: dict[str, Any] = {}
    if workers > 0:
        extra = {
            "persistent_workers": loader.persistent_workers,
            "prefetch_factor": loader.prefetch_factor,
            "multiprocessing_context": loader.multiprocessing_context,
        }
    return DataLoader(
        MarkedSamples(loader.dataset),
        batch_sampler=PoissonSampler(draw, start, counts),
        collate_fn=MarkedCollate(loader.collate_fn),
        num_workers=workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        **extra,
    )
