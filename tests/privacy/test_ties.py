"""The message about a tied weight, between two ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor

from goose_strategy.errors import PrivacyError
from goose_strategy.grads.products import ProductOwed
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.privacy.ties import TiedLink
from tests.harness.worker import Context
from tests.harness.world import run_ranks

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2, 4, 3, generator=GENERATOR)
GRAD = torch.randn(2, 4, 6, generator=GENERATOR)
IDS = torch.tensor([[3, 4, 8, 5], [7, 7, 0, 3]])
START = 3


def owed(scale: float = 1.0) -> ProductOwed:
    return ProductOwed(
        torch.zeros(6, 3),
        None,
        x=X,
        grad=GRAD.reshape(-1, 6) * scale,
        rows=None,
        transposed=False,
        lead=(2, 4),
    )


def exchange(ctx: Context) -> list[Tensor]:
    layout = MeshLayout.from_world(2, tp=1, pp=2)
    mesh = ParallelMesh.create(
        layout, device=torch.device("cpu"), timeout=timedelta(seconds=20), norms=True
    )
    assert mesh.norms is not None
    link = TiedLink(mesh, peer=1 - mesh.rank, start=START, length=6)
    try:
        if mesh.rank == 1:
            sent = [link.send(owed(scale), {"input_ids": IDS}, 2) for scale in (1.0, 2.0)]
            for one in sent:
                one.wait()
            return []
        batch, like = {"input_ids": IDS}, torch.zeros(2, 4, 3)
        local = torch.where((IDS >= START) & (IDS < START + 6), IDS - START, 0)
        for other in (local + 1, local[:, :2]):
            with pytest.raises(PrivacyError, match="other ids than input_ids"):
                link.receive(like, other, batch)
        return [link.receive(like, local, batch).clone() for _ in range(2)]
    finally:
        mesh.close()
        assert mesh.norms is None


def test_rows_arrive_in_order_and_are_those_of_this_slice() -> None:
    first, second = run_ranks(exchange, 2)[0]
    whole = torch.einsum("btv,bth->bvh", GRAD, X)
    for row in range(2):
        for token in range(4):
            local = int(IDS[row, token]) - START
            if 0 <= local < 6:
                assert torch.allclose(first[row, token], whole[row, local], atol=1e-6)
    assert torch.allclose(second, 2 * first, atol=1e-6)


def test_a_rank_without_a_tied_weight_has_no_link() -> None:
    class Alone:
        tie = None
        rank = 0

    with pytest.raises(PrivacyError, match="holds no tied weight"):
        TiedLink(Alone(), peer=1, start=0, length=2)  # type: ignore[arg-type]


def test_ids_are_needed() -> None:
    link = TiedLink.__new__(TiedLink)
    with pytest.raises(PrivacyError, match="needs input_ids"):
        link.send(owed(), {"inputs_embeds": X}, 2)
