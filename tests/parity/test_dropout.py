"""Dropout on every axis: equal where it must be, different where it must be, replayed when asked.

Masks are seen where all of transformers' dropout ends, in ``torch.nn.functional``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.runtime import dropout as runtime_dropout
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.tensor_parallel.dropout import LocalStream
from tests.harness.models import Batch
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.parity.grid import DEADLINE, Case, Plant, assemble, assert_parity, run_case, train
from tests.parity.session import MeshSession, Pieces, Session

SEED = 7


def seeded(session: Session, case: Case) -> None:
    """Train from a known random state, and draw between the steps as a loader would."""
    torch.manual_seed(SEED)
    for batch in case.batches():
        session.backward(session.loss(batch))
        session.step()
        torch.rand(3)


# -- tp alone: what is dropped on whole tensors is what one process drops --------------------------

RESIDUAL = {
    "gpt2": (("resid_pdrop", 0.3), ("embd_pdrop", 0.2)),
    "bloom": (("hidden_dropout", 0.3),),
    "opt": (("dropout", 0.3),),
    "falcon": (("hidden_dropout", 0.3),),
    "gpt_neox": (("hidden_dropout", 0.3),),
    "phi3": (("resid_pdrop", 0.3),),
    "mixtral": (("router_jitter_noise", 0.2),),
}


def residual(family: Any, steps: int = 3) -> Case:
    return Case(family=family, settings=RESIDUAL[family], tp=2, steps=steps)


@pytest.mark.parametrize("family", RESIDUAL)
def test_dropout_on_whole_tensors_is_that_of_one_process(family: str) -> None:
    assert_parity(residual(family), scenario=seeded)


def local_everywhere(mesh: ParallelMesh) -> AbstractContextManager[object]:
    """A rank stays in its own stream when its row layer has summed."""
    return patch.object(LocalStream, "leave", lambda self: None)


def test_a_rank_that_stays_in_its_own_stream_is_found() -> None:
    case = Case(family="gpt2", settings=(("resid_pdrop", 0.3), ("attn_pdrop", 0.3)), tp=2, steps=1)
    run_case(case, seeded)
    with pytest.raises(AssertionError, match="differ"):
        run_case(case, seeded, local_everywhere)


def drawn_by_one_rank(session: Session, case: Case) -> None:
    """A rank draws numbers that the others do not."""
    torch.manual_seed(SEED)
    if isinstance(session, MeshSession):
        assert session.mesh.tp is not None
        if session.mesh.tp_rank == 1:
            torch.rand(1)
        batch = case.batches()[0]
        if session.mesh.rank == 0:
            with pytest.warns(UserWarning, match="first rank's random state is used"):
                session.loss(batch)
        else:
            session.loss(batch)
        session.zero_grad()
        torch.manual_seed(SEED)
    train(session, case)


def test_a_rank_that_draws_alone_is_brought_back() -> None:
    case = residual("gpt2", steps=1)
    run = run_case(case, drawn_by_one_rank)
    assert len(run.losses) == 2
    assert run.losses[0] == run.losses[1]


def never_compared(mesh: ParallelMesh) -> AbstractContextManager[object]:
    return patch.object(runtime_dropout.DropoutStream, "_agree", lambda self, state: None)


def drawn_silently(session: Any, case: Case) -> None:
    torch.manual_seed(SEED + session.mesh.tp_rank)
    train(session, case)


def test_without_the_comparison_masks_would_differ() -> None:
    with pytest.raises(AssertionError, match="differ"):
        run_case(residual("gpt2", steps=1), drawn_silently, never_compared)


# -- masks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Masks:
    """Which elements one rank kept, in the order of the calls: of attention, and elsewhere."""

    place: tuple[int, int, int]
    heads: list[Tensor]
    whole: list[Tensor]
    user: list[float]


@contextmanager
def recorded(into: list[Tensor]) -> Iterator[None]:
    drop = functional.dropout

    def keep(whole: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        output = drop(whole, p, training, inplace)
        # A stage replays what is before its layers on zeros, which show no mask.
        if training and p > 0 and output.any():
            into.append((output != 0).detach())
        return output

    with patch.object(functional, "dropout", keep):
        yield


DROPS = (
    ("resid_pdrop", 0.3),
    ("embd_pdrop", 0.3),
    ("attn_pdrop", 0.3),
    ("attn_implementation", "eager"),
)
GPT2 = Case(family="gpt2", settings=DROPS, steps=2, microbatches=2)


def same_rows(case: Case, number: int) -> list[Batch]:
    """Global batches of which every replica gets the same rows."""
    few = replace(case, rows=4, steps=number).batches()
    return [{k: v.repeat(case.dp, *[1] * (v.dim() - 1)) for k, v in b.items()} for b in few]


def _masks(ctx: Context, case: Case, plant: Plant | None) -> Masks:
    torch.manual_seed(SEED)
    runtime = ParallelRuntime(case.config())
    runtime.start(torch.device("cpu"), timeout=DEADLINE)
    seen: list[Tensor] = []
    user: list[float] = []
    try:
        session = MeshSession(runtime, case.model(), optimizer="sgd", autocast=None)
        with recorded(seen), nullcontext() if plant is None else plant(runtime.mesh):
            for batch in same_rows(case, case.steps):
                session.backward(session.loss(batch))
                session.step()
                user.append(torch.rand(()).item())
        place = tuple(runtime.mesh.coordinates)
    finally:
        runtime.stop()
    heads = [mask for mask in seen if mask.dim() == 4]
    return Masks(place, heads, [mask for mask in seen if mask.dim() == 3], user)


def masks_of(case: Case, plant: Plant | None = None) -> dict[tuple[int, int, int], Masks]:
    return {one.place: one for one in run_ranks(_masks, case.world_size, case, plant)}


def all_equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    assert len(mine) == len(theirs) > 0
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def none_equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    assert len(mine) == len(theirs) > 0
    return not any(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def distinct(masks: list[Tensor]) -> bool:
    return len({mask.numpy().tobytes() for mask in masks}) == len(masks)


def assert_tp(ranks: dict[tuple[int, int, int], Masks]) -> None:
    for (pp, dp, tp), mine in ranks.items():
        if tp:
            first = ranks[pp, dp, 0]
            assert all_equal(mine.whole, first.whole), "tp ranks drop other elements"
            assert none_equal(mine.heads, first.heads), "tp ranks repeat a mask on other heads"


def assert_dp(ranks: dict[tuple[int, int, int], Masks]) -> None:
    for (pp, dp, tp), mine in ranks.items():
        if dp:
            first = ranks[pp, 0, tp]
            assert none_equal(mine.whole, first.whole), "replicas drop the same elements"
            assert none_equal(mine.heads, first.heads), "replicas drop the same elements"


def assert_pp(ranks: dict[tuple[int, int, int], Masks]) -> None:
    for (pp, dp, tp), mine in ranks.items():
        if pp:
            every = [*mine.heads, *ranks[0, dp, tp].heads]
            assert distinct(every), "stages drop the same elements"


CUBE = replace(GPT2, tp=2, pp=2, dp=2)


def test_masks_on_every_axis() -> None:
    ranks = masks_of(CUBE)
    assert_tp(ranks)
    assert_dp(ranks)
    assert_pp(ranks)
    for mine in ranks.values():
        assert distinct(mine.heads), "a microbatch, a layer or a step repeats a mask"
        assert distinct(mine.whole), "a microbatch, a layer or a step repeats a mask"
        assert mine.user == ranks[0, 0, 0].user, "the user's numbers differ between ranks"
        torch.manual_seed(SEED)
        assert mine.user == [torch.rand(()).item() for _ in mine.user], "the model drew from them"


def no_local_stream(mesh: ParallelMesh) -> AbstractContextManager[object]:
    return patch.object(LocalStream, "enter", lambda self: None)


def test_regions_without_a_local_stream_are_found() -> None:
    case = replace(GPT2, tp=2, steps=1)
    assert_tp(masks_of(case))
    with pytest.raises(AssertionError, match="repeat a mask"):
        assert_tp(masks_of(case, no_local_stream))


def _unfolded(ctx: Context, case: Case) -> Masks:
    """Every rank is given the seed of the first one."""
    with patch.object(runtime_dropout, "axis_seed", lambda base, at, same_over: base):
        return _masks(ctx, case, None)


@pytest.mark.parametrize("axis", ["dp", "pp"])
def test_streams_without_a_fold_are_found(axis: str) -> None:
    case = replace(GPT2, steps=1, **{axis: 2})
    ranks = {one.place: one for one in run_ranks(_unfolded, 2, case)}
    with pytest.raises(AssertionError, match="drop the same elements"):
        (assert_dp if axis == "dp" else assert_pp)(ranks)


# -- gradients are those of the loss that was computed ---------------------------------------------


@dataclass(frozen=True)
class Slope:
    """A loss on both sides of the parameters along a direction, and the gradient there."""

    sides: tuple[float, float]
    gradient: Pieces


STEP = 1e-6


def direction(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) * 1009 + sum(name.encode()))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _slope(ctx: Context, case: Case) -> Slope:
    runtime = ParallelRuntime(case.config())
    runtime.start(torch.device("cpu"), timeout=DEADLINE)
    try:
        session = MeshSession(runtime, case.model(), optimizer="sgd", autocast=None)
        stream = session.handle.dropout
        kept = stream.state_dict()
        (batch,) = case.batches()

        def loss() -> Tensor:
            torch.manual_seed(SEED)
            stream.load_state_dict(kept)
            return session.loss(batch)

        session.backward(loss())
        assert session.handle.reducer is not None
        gradient = session.pieces(session.handle.reducer.full_gradients())
        sides = []
        for factor in (STEP, -2 * STEP):
            with torch.no_grad():
                for name, param in session.model.named_parameters():
                    spec = session.handle.surgery.specs[name]
                    along = direction(spec.tie or name, spec.global_shape)
                    for box, piece in spec.pieces(param.data):
                        at = tuple(slice(a, a + n) for a, n in zip(*box, strict=True))
                        piece.add_(along[at], alpha=factor)
                sides.append(loss().item())
        return Slope((sides[0], sides[1]), gradient)
    finally:
        runtime.stop()


SLOPES = [
    replace(GPT2, steps=1, tp=2),
    replace(GPT2, steps=1, tp=2, pp=2),
    replace(GPT2, steps=1, dp=2, tp=2),
    Case(settings=(("attention_dropout", 0.3),), steps=1, tp=2),
    Case(family="opt", settings=(("attention_dropout", 0.3), ("dropout", 0.3)), steps=1, tp=2),
]


def slope_error(case: Case) -> float:
    ranks = run_ranks(_slope, case.world_size, case)
    gradient = assemble([rank.gradient for rank in ranks], "gradients")
    whole = {name: direction(name, tuple(grad.shape)) for name, grad in gradient.items()}
    along = sum(float((grad * whole[name]).sum()) for name, grad in gradient.items())
    plus, minus = ranks[0].sides
    return abs((plus - minus) / (2 * STEP) - along) / abs(along)


@pytest.mark.parametrize("case", SLOPES, ids=str)
def test_gradients_are_those_of_the_masks(case: Case) -> None:
    assert slope_error(case) < 1e-7
