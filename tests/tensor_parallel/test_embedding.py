from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.tensor_parallel.embedding import VocabParallelEmbedding
from goose_strategy.tensor_parallel.slicing import Slicer
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.tensor_parallel.helpers import with_mesh

VOCAB = 11
IDS = torch.tensor([[0, 10, 5, 5], [6, 1, 2, 9]])


def _plain(padding: int | None) -> nn.Embedding:
    torch.manual_seed(1)
    embedding = nn.Embedding(VOCAB, 3, padding_idx=padding, dtype=torch.float64)
    with torch.no_grad():
        embedding.weight.normal_()
    return embedding


def _look_up(embedding: nn.Embedding) -> tuple[Tensor, Tensor]:
    output = embedding(IDS)
    output.backward(torch.arange(output.numel(), dtype=output.dtype).view_as(output) + 1)
    assert embedding.weight.grad is not None
    return output.detach(), embedding.weight.grad


@with_mesh
def _parallel(ctx: Context, mesh: ParallelMesh, padding: int | None) -> tuple[Tensor, Tensor]:
    slicer = Slicer(parts=mesh.tp_size, index=mesh.tp_rank)
    embedding = VocabParallelEmbedding.convert(_plain(padding), slicer, mesh.tp)
    ids = IDS.clone()
    result = _look_up(embedding)
    assert torch.equal(ids, IDS)
    return result


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("padding", [None, 0, 5, 10])
def test_it_is_the_plain_embedding_bit_by_bit(tp: int, padding: int | None) -> None:
    output, grad = _look_up(_plain(padding))
    ranks = run_ranks(_parallel, tp, padding)
    assert all(torch.equal(mine, output) for mine, _ in ranks)
    assert torch.equal(torch.cat([grad for _, grad in ranks]), grad)
    if padding is not None:
        assert not grad[padding].any()
