"""What the engine hands over between ``I`` and ``W``, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import PrivacyError
from goose_strategy.grads.products import embedding, linear
from goose_strategy.grads.store import WeightGradStore, WeightGradWork
from goose_strategy.privacy.classes import Share
from goose_strategy.privacy.clipping import NARROW_MARGIN, SampleClipping
from goose_strategy.privacy.config import PrivacyConfig


class Mesh:
    """One rank alone."""

    device = torch.device("cpu")
    tp = norms = None
    tp_rank, pp_size = 0, 1


WEIGHT = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
X = torch.randn(2, 5, 3, dtype=torch.float64)


def clipping_of(*params: nn.Parameter, shared: bool = False, **settings: Any) -> SampleClipping:
    config = PrivacyConfig(
        **{"noise_multiplier": 0.0, "sampling": "none", "max_grad_norm": 0.5, **settings}
    )
    shares = {id(p): Share("w", "shard", tied=shared, tied_here=shared) for p in params}
    made = SampleClipping(
        config,
        Mesh(),  # type: ignore[arg-type]
        stages=[0],
        shares=shares,
        link=None,
        dtype=torch.float64,
    )
    made.masks = [torch.ones(2)]
    made.begin([{}])
    return made


def pushed(store: WeightGradStore, times: int = 1) -> WeightGradWork:
    with store.collecting():
        out = sum(linear(X, WEIGHT, store=store).square().sum((1, 2)) for _ in range(times))
        assert isinstance(out, Tensor)
        out.sum().backward()
    return store.take()


def per_sample() -> Tensor:
    rows = [torch.autograd.grad((X[i] @ WEIGHT.T).square().sum(), WEIGHT)[0] for i in range(2)]
    return torch.stack(rows)


def test_every_sample_is_clipped() -> None:
    WEIGHT.grad = None
    clipping = clipping_of(WEIGHT)
    clipping.collect((0, 0), pushed(WeightGradStore(per_sample=True)))
    assert WEIGHT.grad is None
    clipping.run((0, 0))
    clipping.end()
    gradients = per_sample()
    norms = torch.flatten(gradients, 1).norm(dim=1)
    expected = torch.einsum("i,i...->...", (0.5 / (norms + 1e-6)).clamp(max=1), gradients)
    assert torch.allclose(WEIGHT.grad, expected, rtol=1e-12)  # type: ignore[arg-type]
    assert torch.allclose(clipping.stats.norms[0], norms, rtol=1e-12)


def test_a_row_that_is_no_sample_counts_as_nothing() -> None:
    WEIGHT.grad = None
    clipping = clipping_of(WEIGHT)
    clipping.masks = [torch.tensor([0, 7])]
    clipping.collect((0, 0), pushed(WeightGradStore(per_sample=True)))
    clipping.run((0, 0))
    gradient = per_sample()[1]
    expected = gradient * min(1.0, 0.5 / (float(gradient.norm()) + 1e-6))
    assert torch.allclose(WEIGHT.grad, expected, rtol=1e-12)  # type: ignore[arg-type]


def test_a_weight_used_twice_is_refused() -> None:
    clipping = clipping_of(WEIGHT)
    with pytest.raises(PrivacyError, match="w was used more than once"):
        clipping.collect((0, 0), pushed(WeightGradStore(per_sample=True), times=2))


def test_a_weight_that_was_thawed_later_is_refused() -> None:
    clipping = clipping_of()
    with pytest.raises(PrivacyError, match="was not among the trainable ones"):
        clipping.collect((0, 0), pushed(WeightGradStore(per_sample=True)))


def test_what_was_put_off_must_run() -> None:
    clipping = clipping_of(WEIGHT)
    clipping.collect((0, 0), pushed(WeightGradStore(per_sample=True)))
    with pytest.raises(PrivacyError, match=r"microbatches \[0\] were left"):
        clipping.end()
    # A call that failed leaves nothing to the next one.
    clipping.begin([{}])
    clipping.end()


@pytest.mark.parametrize("tied", ["exact", "bound"])
def test_a_weight_that_table_and_head_share(tied: str) -> None:
    WEIGHT.grad = None
    ids = torch.tensor([[0, 1, 1, 3, 2], [2, 2, 2, 2, 2]])
    store = WeightGradStore(per_sample=True)

    def loss(rows: slice) -> Tensor:
        hidden = embedding(ids[rows], WEIGHT, None, store=store)
        return linear(hidden.sin(), WEIGHT, store=store).square().sum()

    clipping = clipping_of(WEIGHT, shared=True, tied=tied)
    with store.collecting():
        loss(slice(None)).backward()
    clipping.collect((0, 0), store.take())
    clipping.run((0, 0))
    norms = torch.stack(
        [torch.autograd.grad(loss(slice(i, i + 1)), WEIGHT)[0].norm() for i in range(2)]
    )
    found = clipping.stats.norms[0]
    if tied == "exact":
        assert torch.allclose(found, norms, rtol=1e-12)
    else:
        assert bool((found >= norms).all())


def test_limits() -> None:
    assert clipping_of(WEIGHT).limit == 0.5
    narrow = nn.Parameter(torch.zeros(2).bfloat16())
    made = clipping_of(narrow)
    made.narrow = True
    assert made.limit == 0.5 * NARROW_MARGIN
    with torch.autocast("cpu", torch.bfloat16):
        assert clipping_of(WEIGHT).limit == 0.5 * NARROW_MARGIN
    staged = clipping_of(WEIGHT, clipping="per_stage")
    staged._mesh.pp_size = 4
    assert staged.limit == 0.25
    assert not staged.across_stages
    assert staged.extra == 1
    Mesh.pp_size = 1
