from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from goose_strategy.comm.recorder import Recorder, recording
from goose_strategy.errors import BatchError
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.tensor_parallel.loss import (
    CausalLMLoss,
    VocabSlice,
    shifted,
    valid_token_count,
    vocab_parallel_cross_entropy,
)
from goose_strategy.tensor_parallel.slicing import Cut
from tests.harness.compare import relative_error
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import with_mesh

VOCAB, TOKENS = 13, 10


def _data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[::4] = -100
    targets[1], targets[2] = 0, VOCAB - 1
    return logits.to(dtype), targets


def _expected(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    logits, targets = _data(dtype)
    wide = logits.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    loss = F.cross_entropy(wide, targets, reduction="sum")
    (grad,) = torch.autograd.grad(loss * 0.5, wide)
    return loss.detach(), grad


def _whole(dtype: torch.dtype, **options: Any) -> tuple[Tensor, Tensor]:
    logits, targets = _data(dtype)
    logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(logits * 1, targets, **options)
    (loss * 0.5).backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rel"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)],
)
def test_whole_logits_give_torchs_cross_entropy(
    dtype: torch.dtype, rel: float, reuse: bool
) -> None:
    loss, grad = _whole(dtype, reuse_logits=reuse)
    expected, expected_grad = _expected(dtype)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert relative_error(loss, expected) <= min(rel, 1e-6)
    assert grad.dtype == dtype
    assert relative_error(grad, expected_grad) <= rel


@with_mesh
def _sliced(
    ctx: Context, mesh: ParallelMesh, reuse: bool
) -> tuple[Tensor, Tensor, list[tuple[str, tuple[int, ...]]]]:
    logits, targets = _data()
    cut = Cut(1, VOCAB, mesh.tp_size, mesh.tp_rank)
    local = cut.take(logits).requires_grad_()
    mine = VocabSlice(mesh.tp, cut.start, cut.length, VOCAB)
    recorder = Recorder()
    with recording(recorder):
        loss = vocab_parallel_cross_entropy(local * 1, targets, mine, reuse_logits=reuse)
        (loss * 0.5).backward()
    assert local.grad is not None
    return loss.detach(), local.grad, [(one.op, one.shape) for one in recorder.launches]


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_slices_give_the_same_with_two_small_all_reduces(tp: int, reuse: bool) -> None:
    expected, expected_grad = _expected(torch.float64)
    ranks = run_ranks(_sliced, tp, reuse)
    assert len({loss.item() for loss, _, _ in ranks}) == 1
    assert relative_error(ranks[0][0], expected) <= 1e-14
    assert relative_error(torch.cat([grad for _, grad, _ in ranks], 1), expected_grad) <= 1e-14
    small = [("all_reduce max", (TOKENS,)), ("all_reduce sum", (2, TOKENS))]
    assert all(launches == small for _, _, launches in ranks)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4], [0.0, 300.0]], requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 1]))
    assert loss.item() == 2e4


def test_a_second_backward_raises() -> None:
    logits, targets = _data()
    loss = vocab_parallel_cross_entropy(logits.requires_grad_(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class _Allocations(TorchDispatchMode):
    """Counts new tensors of one size."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel = numel
        self.storages: set[int] = set()
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        large = isinstance(result, Tensor) and result.numel() == self.numel
        if large and result.untyped_storage().nbytes() >= 4 * self.numel:
            self.storages.add(result.untyped_storage().data_ptr())
            self.kept.append(result)
        return result


@pytest.mark.parametrize(
    ("dtype", "reuse", "buffers"),
    [
        (torch.float32, False, 1),
        (torch.float32, True, 0),
        # The exponentials in fp32; the gradient in bf16 is half as large and not counted.
        (torch.bfloat16, True, 1),
    ],
)
def test_memory_is_one_buffer_of_the_logits_size(
    dtype: torch.dtype, reuse: bool, buffers: int
) -> None:
    leaf = torch.randn(64, 50).to(dtype).requires_grad_()
    logits = leaf.view_as(leaf)
    known = {logits.untyped_storage().data_ptr()}
    targets = torch.randint(0, 50, (64,))
    with _Allocations(logits.numel()) as seen:
        loss = vocab_parallel_cross_entropy(logits, targets, reuse_logits=reuse)
        torch.autograd.grad(loss, leaf)
    assert len(seen.storages - known) == buffers


def test_an_unknown_label_is_nan_not_a_small_loss() -> None:
    loss = vocab_parallel_cross_entropy(torch.randn(2, 3), torch.tensor([1, 3]))
    assert loss.isnan()


def _batch() -> tuple[Tensor, Tensor]:
    logits, _ = _data()
    labels = torch.tensor([[1, 2, -100, 4, 5], [0, -100, -100, 12, -100]])
    return logits.view(2, 5, VOCAB), labels


def _plain(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), **options)


def test_it_shifts_the_labels_once() -> None:
    logits, labels = _batch()
    loss = CausalLMLoss()
    assert torch.isclose(loss(logits, labels, VOCAB), _plain(logits, labels))
    moved = shifted(labels)
    assert moved.tolist()[0] == [2, -100, 4, 5, -100]
    same = loss(logits=logits, labels=None, vocab_size=VOCAB, shift_labels=moved)
    assert torch.equal(same, loss(logits, labels, VOCAB))


@pytest.mark.parametrize("count", [7, 7.0, torch.tensor(7), torch.tensor(7.0)])
def test_it_divides_by_the_tokens_of_the_global_batch(count: Tensor | float) -> None:
    logits, labels = _batch()
    expected = _plain(logits, labels, reduction="sum") / 7
    given = CausalLMLoss()(logits, labels, VOCAB, num_items_in_batch=count, use_cache=False)
    assert torch.isclose(given, expected)
    assert torch.isclose(CausalLMLoss(count=lambda: count)(logits, labels, VOCAB), expected)
    # What the call says wins over what the runtime would say.
    both = CausalLMLoss(count=lambda: 1)(logits, labels, VOCAB, num_items_in_batch=count)
    assert torch.isclose(both, expected)


def test_without_a_count_it_is_the_mean() -> None:
    logits, labels = _batch()
    assert torch.isclose(CausalLMLoss(count=lambda: None)(logits, labels), _plain(logits, labels))


@pytest.mark.parametrize("count", [None, 0, torch.tensor(0)])
def test_no_valid_token_is_a_loss_of_zero(count: Tensor | int | None) -> None:
    logits = torch.randn(1, 3, 4, requires_grad=True)
    loss = CausalLMLoss()(logits, torch.full((1, 3), -100), num_items_in_batch=count)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_another_ignored_label() -> None:
    logits, labels = _batch()
    labels[labels == -100] = 3
    expected = _plain(logits, labels, ignore_index=3)
    assert torch.isclose(CausalLMLoss()(logits, labels, VOCAB, ignore_index=3), expected)


def test_a_label_outside_the_vocabulary_is_named() -> None:
    logits, labels = _batch()
    labels[1, 3] = VOCAB
    with pytest.raises(BatchError, match=r"label=13 is outside the vocabulary of 13 ids"):
        CausalLMLoss()(logits, labels, VOCAB)
    with pytest.raises(BatchError, match="labels=None"):
        CausalLMLoss()(logits, None, VOCAB)


def test_valid_tokens_are_counted_as_the_loss_sees_them() -> None:
    _, labels = _batch()
    assert valid_token_count(labels).item() == 4
    assert valid_token_count(shifted(labels), shift=False).item() == 4
    assert valid_token_count(labels, shift=False).item() == 6
    assert valid_token_count(labels, ignore_index=0).item() == 8


@with_mesh
def _both_widths(ctx: Context, mesh: ParallelMesh) -> tuple[float, float]:
    logits, labels = _batch()
    cut = Cut(2, VOCAB, mesh.tp_size, mesh.tp_rank)
    loss = CausalLMLoss(VocabSlice(mesh.tp, cut.start, cut.length, VOCAB), reuse_logits=True)
    whole = logits.clone()
    given_whole = loss(whole, labels, VOCAB)
    # Whole logits belong to the caller and are never overwritten.
    assert torch.equal(whole, logits)
    return loss(cut.take(logits), labels, VOCAB).item(), given_whole.item()


def test_local_and_whole_logits_are_both_taken() -> None:
    logits, labels = _batch()
    expected = _plain(logits, labels).item()
    for local, whole in run_ranks(_both_widths, 2):
        assert local == pytest.approx(expected, rel=1e-14)
        assert whole == pytest.approx(expected, rel=1e-14)
