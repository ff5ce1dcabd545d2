"""The check of streams goes the way of a card on the CPU, and sees other bits."""

from __future__ import annotations

import pytest
import torch

from cuda_ops.bench import order
from cuda_ops.bench.order import check_graph, check_streams
from cuda_ops.bench.place import Place
from cuda_ops.bindings import Library
from cuda_ops.layout import CHUNK
from cuda_ops.reference.calls import Reference


def _place(cpu: Library) -> Place:
    return Place(torch.device("cpu"), CHUNK, cpu, Reference())


def test_late_gradients_give_the_same_bits(cpu: Library) -> None:
    assert check_streams(_place(cpu)) == (["no stream (dry run): the same bits"], False)
    assert check_graph(_place(cpu)) == (["CUDA graph: not in a dry run"], False)


def test_gradients_that_are_not_there_yet_are_seen(
    cpu: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, calls = order._whole_step, [0]

    def too_soon(place, grad, *rest):
        calls[0] += 1
        # The steps with late gradients come after the three plain ones.
        whole(place, torch.zeros_like(grad) if calls[0] == 5 else grad, *rest)

    monkeypatch.setattr(order, "_whole_step", too_soon)
    assert check_streams(_place(cpu)) == (["no stream (dry run): OTHER BITS"], True)


@pytest.mark.gpu
def test_on_a_card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from cuda_ops.bench.place import find_place

    lines, bad = check_streams(find_place(dry=False))
    assert not bad, lines
    assert len(lines) == 4
