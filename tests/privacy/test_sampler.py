"""Draws are Poisson's, the same on every rank, evenly shared, and marked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from goose_strategy.errors import BatchError, ConfigError
from goose_strategy.privacy.clipping import MASK
from goose_strategy.privacy.sampler import (
    Draw,
    MarkedCollate,
    PoissonSampler,
    check_loader,
    is_shuffled,
    poisson_loader,
)

DRAW = Draw(size=200, rate=0.1, most=None, root=b"r" * 32, replicas=1, replica=0, multiple=4)


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Samples that tell their number."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([number, 1])}


def test_every_sample_is_drawn_by_itself() -> None:
    draws, counts, sizes = 2000, Counter[int](), []
    for number in range(1, draws + 1):
        found = DRAW.samples(number).tolist()
        assert len(set(found)) == len(found)
        counts.update(found)
        sizes.append(len(found))
    spread = draws * 0.1 * 0.9
    chi = sum((counts[sample] - draws * 0.1) ** 2 / spread for sample in range(200))
    assert abs(chi - 200) < 5 * math.sqrt(2 * 200)
    mean = sum(sizes) / draws
    variance = sum((size - mean) ** 2 for size in sizes) / draws
    assert abs(mean - 20) < 4 * math.sqrt(18 / draws)
    # Of a binomial number; samples that stick together would show here.
    assert abs(variance - 18) < 4 * 18 * math.sqrt(2 / draws)


def test_two_samples_are_drawn_independently() -> None:
    draws = [set(DRAW.samples(number).tolist()) for number in range(1, 4001)]
    both = sum({3, 4} <= one for one in draws) / 4000
    assert abs(both - 0.01) < 4 * math.sqrt(0.01 / 4000)
    repeated = sum(3 in one and 3 in two for one, two in pairwise(draws)) / 3999
    assert abs(repeated - 0.01) < 4 * math.sqrt(0.01 / 4000)


def test_replicas_share_one_draw_evenly() -> None:
    for number in range(1, 50):
        shares = [replace(DRAW, replicas=3, replica=replica).rows(number) for replica in range(3)]
        assert len({len(share) for share in shares}) == 1
        assert all(len(share) % 4 == 0 and share for share in shares)
        drawn = [sample for share in shares for sample, mark in share if mark]
        assert sorted(drawn) == DRAW.samples(number).tolist()
        assert {mark for share in shares for _, mark in share} <= {0, number}


def test_an_empty_draw_has_rows_that_count_as_nothing() -> None:
    empty = replace(DRAW, size=3, rate=1e-9)
    assert empty.rows(1) == [(0, 0)] * 4


def test_a_draw_is_cut_off_at_random() -> None:
    cut = replace(DRAW, most=10)
    kept = Counter[int]()
    for number in range(1, 1500):
        found, all_of_it = cut.samples(number), DRAW.samples(number)
        assert len(found) == min(10, len(all_of_it))
        assert set(found) <= set(all_of_it)
        kept.update(found.tolist())
    halves = [sum(kept[s] for s in range(100)), sum(kept[s] for s in range(100, 200))]
    assert abs(halves[0] - halves[1]) < 5 * math.sqrt(sum(halves))


def test_a_pass_goes_on_where_the_last_one_stopped() -> None:
    sampler = PoissonSampler(DRAW)
    assert len(sampler) == 10
    first, second = list(sampler), list(sampler)
    assert first[0] != second[0]
    assert sampler.number == 20
    counts: dict[int, int] = {}
    assert list(PoissonSampler(DRAW, 10, counts)) == second
    assert counts == {11 + n: sum(mark > 0 for _, mark in one) for n, one in enumerate(second)}


def test_other_roots_draw_other_samples() -> None:
    other = replace(DRAW, root=b"s" * 32)
    assert DRAW.samples(1).tolist() != other.samples(1).tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_is_replaced(workers: int) -> None:
    plain = DataLoader(Numbers(), batch_size=7, shuffle=True, num_workers=workers, drop_last=True)
    loader = poisson_loader(plain, DRAW)
    assert len(loader) == 10
    batch = next(iter(loader))
    rows = DRAW.rows(1)
    assert batch["input_ids"][:, 0].tolist() == [sample for sample, _ in rows]
    assert batch[MASK].tolist() == [mark for _, mark in rows]
    assert loader.num_workers == workers


def test_a_collate_that_breaks_the_rows_is_refused() -> None:
    def as_list(samples: list[Any]) -> list[Any]:
        return samples

    def packed(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.cat([sample["input_ids"] for sample in samples])[None]}

    marked = [({"input_ids": torch.ones(2)}, 1)] * 3
    with pytest.raises(BatchError, match="makes a list"):
        MarkedCollate(as_list)(marked)
    with pytest.raises(BatchError, match=r"shape \(1, 6\), but 3 samples"):
        MarkedCollate(packed)(marked)


def test_which_loaders_are_for_training() -> None:
    assert is_shuffled(DataLoader(Numbers(), shuffle=True))
    assert not is_shuffled(DataLoader(Numbers()))
    distributed = DistributedSampler(Numbers(), num_replicas=2, rank=0, shuffle=True)
    assert is_shuffled(DataLoader(Numbers(), sampler=distributed))
    distributed = DistributedSampler(Numbers(), num_replicas=2, rank=0, shuffle=False)
    assert not is_shuffled(DataLoader(Numbers(), sampler=distributed))
    assert not is_shuffled([1, 2])


class Stream(IterableDataset[int]):
    """Has no numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


def test_loaders_that_break_poisson_sampling_are_refused() -> None:
    check_loader(DataLoader(Numbers(), shuffle=True, drop_last=True))
    weighted = WeightedRandomSampler([1.0] * 200, 10)
    repeated = RandomSampler(Numbers(), replacement=True)
    for loader, match in (
        (DataLoader(Numbers(), sampler=weighted), "sampler=WeightedRandomSampler"),
        (DataLoader(Numbers(), sampler=repeated), "replacement=True"),
        (DataLoader(Stream()), "sampler=_InfiniteConstantSampler"),
        ([1, 2], "list over NoneType"),
    ):
        with pytest.raises(ConfigError, match=match):
            check_loader(loader)
