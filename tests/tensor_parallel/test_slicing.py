from __future__ import annotations

import pytest
import torch
from torch import nn

from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.slicing import Cut, Slicer, balanced_sizes, replace_data


@pytest.mark.parametrize(
    ("total", "parts", "sizes"),
    [(97, 2, (49, 48)), (97, 4, (25, 24, 24, 24)), (9, 4, (3, 2, 2, 2)), (8, 4, (2, 2, 2, 2))],
)
def test_slices_differ_by_one_at_most(total: int, parts: int, sizes: tuple[int, ...]) -> None:
    assert balanced_sizes(total, parts) == sizes


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_the_slices_of_all_ranks_cover_the_dimension(parts: int) -> None:
    whole = torch.arange(5 * 11).view(5, 11)
    cuts = [Cut(1, 11, parts, index) for index in range(parts)]
    assert torch.equal(torch.cat([cut.take(whole) for cut in cuts], 1), whole)
    assert [cut.start for cut in cuts[1:]] == [cut.stop for cut in cuts[:-1]]


def test_a_slice_is_its_own_contiguous_tensor() -> None:
    whole = torch.randn(6, 8)
    part = Cut(1, 8, 2, 1).take(whole)
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == 6 * 4 * 4


def test_a_dimension_smaller_than_tp_is_refused() -> None:
    with pytest.raises(PlanError, match=r"tp=4 is larger than the dimension to cut, 3"):
        Cut(0, 3, 4, 0)


def test_the_spec_names_the_box() -> None:
    weight = nn.Parameter(torch.randn(9, 4))
    slicer = Slicer(parts=4, index=2)
    spec = slicer.cut(weight, 0).spec("head.weight", weight)
    assert spec.global_shape == (9, 4)
    assert spec.offsets == (5, 0)
    assert spec.local_shape == tuple(weight.shape) == (2, 4)
    assert spec.tp_dim == 0
    assert not spec.tp_partial


def test_the_parameter_stays_the_same_object_and_frozen() -> None:
    weight = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    slicer = Slicer(parts=2, index=1)
    expected = weight.data[:, 2:].clone()
    slicer.cut(weight, 1)
    assert torch.equal(weight, expected)
    assert not weight.requires_grad
    assert [param for param, _ in slicer.items()] == [weight]


def test_a_shared_weight_is_cut_once() -> None:
    weight = nn.Parameter(torch.randn(8, 4))
    slicer = Slicer(parts=2, index=0)
    assert slicer.cut(weight, 0) is slicer.cut(weight, 0)
    assert weight.shape == (4, 4)
    with pytest.raises(PlanError, match="dim=0 and dim=1; untie it"):
        slicer.cut(weight, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_data_may_change_while_an_old_graph_lives(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(4, 3).to(dtype))
    alive = weight.sum()
    alive.backward()
    replace_data(weight, weight.data[:2].clone())
    assert weight.grad is None
    (weight * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full((2, 3), 2, dtype=dtype))
    assert alive.grad_fn is not None


def test_parameters_without_storage_are_cut_too() -> None:
    weight = nn.Parameter(torch.empty(6, 4, device="meta"))
    Slicer(parts=3, index=0).cut(weight, 0)
    assert weight.is_meta
    assert weight.shape == (2, 4)


PACKED = [((1, 1, 1), 12, 2), ((4, 2, 2), 16, 2), ((8, 4, 4), 16, 4), ((1, 1), 16, 8)]


@pytest.mark.parametrize(("packed", "total", "parts"), PACKED)
@pytest.mark.parametrize("dim", [0, 1])
def test_matrices_side_by_side_are_each_cut(
    packed: tuple[int, ...], total: int, parts: int, dim: int
) -> None:
    whole = torch.arange(3 * total).view((total, 3) if dim == 0 else (3, total))
    cuts = [Cut(dim, total, parts, index, packed) for index in range(parts)]
    slices = [cut.take(whole) for cut in cuts]
    matrices = whole.split([total // sum(packed) * ratio for ratio in packed], dim)
    for index, mine in enumerate(slices):
        expected = torch.cat([matrix.chunk(parts, dim)[index] for matrix in matrices], dim)
        assert torch.equal(mine, expected)
        assert cuts[index].sizes == (total // parts,) * parts
        spec = cuts[index].spec("qkv", mine)
        for box, piece in spec.pieces(mine):
            place = tuple(slice(at, at + n) for at, n in zip(*box, strict=True))
            assert torch.equal(whole[place], piece)
    assert torch.equal(cuts[0].join(torch.cat(slices, dim)), whole)


@pytest.mark.parametrize(
    ("packed", "total", "message"),
    [
        ((1, 1, 1), 16, r"does not hold matrices in the ratio \(1, 1, 1\)"),
        ((4, 1, 1), 24, r"tp=8 does not divide .* \(16, 4, 4\); choose a divisor of 4"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(
    packed: tuple[int, ...], total: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        Cut(0, total, 8, 0, packed)
