from __future__ import annotations

import pytest
import torch

from cuda_ops.reference.philox import philox, random_halves

# The known answers of Random123 for philox4x32 with 7 rounds: counter, key, words.
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
        (PI, (0xA4093822, 0x299F31D0), (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    ],
)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    found = philox(
        as_int64(key), as_int64(counter[:2]), stream=counter[2], step=torch.tensor(counter[3])
    )
    assert tuple(found[0].tolist()) == words


def as_int64(halves: tuple[int, ...]) -> torch.Tensor:
    value = halves[0] | (halves[1] << 32)
    return torch.tensor([value - 2**64 if value >= 2**63 else value])


def test_halves_are_the_words_lower_half_first() -> None:
    key, counter = torch.tensor([5]), torch.tensor([7])
    words = philox(key, counter, stream=1, step=torch.tensor(3))[0].tolist()
    halves = random_halves(key, counter, stream=1, step=torch.tensor(3))[0].tolist()
    assert halves == [half for word in words for half in (word & 0xFFFF, word >> 16)]


def test_key_counter_stream_and_step_all_matter() -> None:
    key = torch.tensor([1, 2, 1 + 2**40])
    draws = {
        tuple(row)
        for stream in (0, 1)
        for step in (1, 2)
        for counter in (0, 1, 2**32)
        for row in philox(
            key, torch.full((3,), counter), stream=stream, step=torch.tensor(step)
        ).tolist()
    }
    assert len(draws) == 2 * 2 * 3 * 3


def test_halves_are_uniform() -> None:
    halves = random_halves(
        torch.full((50000,), 99), torch.arange(50000), stream=0, step=torch.tensor(1)
    )
    buckets = torch.bincount(halves.view(-1) >> 8, minlength=256).double()
    expected = halves.numel() / 256
    chi2 = float(((buckets - expected) ** 2 / expected).sum())
    assert 160 < chi2 < 360  # 255 degrees of freedom: four standard deviations
