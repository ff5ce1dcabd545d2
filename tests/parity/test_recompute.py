"""What is computed a second time trains as what is kept: to the bit, dropout included.

Without dropout every number is compared with one process, in fp64; with it, with the same mesh that
keeps its activations.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.mesh.generators import Generators
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.pipeline_parallel import replay
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.pipeline_parallel.work import Work
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.models import Batch
from tests.harness.worker import Context
from tests.harness.world import RankFailure, run_ranks
from tests.parity.grid import DEADLINE, Case, Plant, about, assert_parity
from tests.parity.lora import LoraCase
from tests.parity.session import MeshSession, Session
from tests.parity.test_dropout import DROPS, SEED
from tests.parity.test_replay import REPLAYED, _calls

FULL = (("recompute", "full"),)
LAYER = (("recompute", "layer"),)
MESHES = [
    {"pp": 2},
    {"pp": 4, "microbatches": 5},
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "dp": 2},
]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_whole_stages(family: Any, mesh: dict[str, int], schedule: str) -> None:
    assert_parity(Case(family=family, schedule=schedule, steps=3, pipeline=FULL, **mesh))


NAMED = {
    "llama": ["model.layers.*.mlp", "model.layers.*.self_attn", "model.layers.1.input_layernorm"],
    "gpt2": ["transformer.h.*.attn", "transformer.h.*.mlp"],
    "bloom": ["transformer.h.*.self_attention", "lm_head"],
}


@pytest.mark.parametrize("named", [False, True], ids=["layer", "named"])
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("family", NAMED)
def test_layers_and_modules(family: Any, mesh: dict[str, int], named: bool) -> None:
    recompute = NAMED[family] if named else "layer"
    assert_parity(Case(family=family, steps=2, pipeline=(("recompute", recompute),), **mesh))


def assert_same(plain: Case, **settings: Any) -> list[bool]:
    """Compare two runs of a mesh to the bit; return which ranks computed anything again."""
    again = replace(plain, pipeline=(*plain.pipeline, *settings.items()))
    ranks = [run_ranks(_calls, case.world_size, case) for case in (plain, again)]
    for rank, ((first, _), (second, _)) in enumerate(zip(*ranks, strict=True)):
        for mine, theirs in zip(first, second, strict=True):
            assert mine.keys() == theirs.keys()
            for name, grad in mine.items():
                with about(f"rank {rank}, {name}"):
                    assert torch.equal(grad, theirs[name]), "other masks in the recomputation"
    return [more > less for (_, less), (_, more) in zip(*ranks, strict=True)]


STAGED = [
    {"pp": 2, "microbatches": 4},
    {"pp": 4, "microbatches": 5},
    {"tp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "dp": 2},
]


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("mesh", STAGED, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_stages_drop_what_they_dropped(family: Any, mesh: dict[str, int], schedule: str) -> None:
    drops = DROPS if family == "gpt2" else (("attention_dropout", 0.3), DROPS[-1])
    # Padding is dropped, so that the microbatches of a call have several lengths.
    plain = Case(
        family=family,
        settings=drops,
        steps=2,
        schedule=schedule,
        pipeline=(("trim_padding", True),),
        **mesh,
    )
    again = assert_same(plain, recompute="full")
    last = plain.world_size // plain.pp * (plain.pp - 1)
    assert all(again[:last])
    assert all(one == (schedule == "GPipe") for one in again[last:])


@pytest.mark.parametrize("named", [False, True], ids=["layer", "named"])
@pytest.mark.parametrize("mesh", REPLAYED, ids=str)
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_layers_drop_what_they_dropped(family: Any, mesh: dict[str, int], named: bool) -> None:
    """opt's layers hold column and row layers themselves, and end their streams behind them."""
    names = {"gpt2": NAMED["gpt2"], "opt": ["model.decoder.layers.*.self_attn"]}[family]
    drops = DROPS if family == "gpt2" else (("attention_dropout", 0.3), DROPS[-1])
    plain = Case(family=family, settings=drops, steps=2, microbatches=2, **mesh)
    assert all(assert_same(plain, recompute=names if named else "layer"))


@pytest.mark.parametrize("recompute", ["full", "layer", ["model.layers.*.mlp"]], ids=str)
def test_adapters(recompute: Any) -> None:
    """Their own dropout beside that of the attention; the base is frozen."""
    settings = (("attention_dropout", 0.3), DROPS[-1])
    plain = LoraCase(
        lora=(("lora_dropout", 0.3),), settings=settings, tp=2, pp=2, steps=2, schedule="GPipe"
    )
    assert all(assert_same(plain, recompute=recompute))


@pytest.mark.parametrize("recompute", ["full", "layer"])
def test_mixed_precision(recompute: str) -> None:
    plain = Case(
        family="gpt2", pp=2, dtype=torch.float32, autocast=torch.bfloat16, settings=DROPS, steps=2
    )
    assert_same(plain, recompute=recompute)


# -- planted errors --------------------------------------------------------------------------------


def fresh_masks(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """The second run draws where the first one ended."""

    class Forgetful(Generators):
        def restore(self, state: Any) -> None: ...

    return patch.object(replay, "Generators", Forgetful)


def another_microbatch(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """The second run is given the inputs of a neighbour."""
    compute = Work._compute

    def swapped(work: Work, place: Any, received: Any) -> Any:
        other = (place[0], place[1] ^ 1)
        if torch.is_grad_enabled() and place in work._recomputed and other in work._kept:
            return compute(work, other, received)
        return compute(work, place, received)

    return patch.object(Work, "_compute", swapped)


def kept_inputs_of_another_microbatch(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """The second run receives what a neighbour had received."""
    recompute = Work.recompute

    def swapped(work: Work, place: Any) -> None:
        other, kept = (place[0], place[1] ^ 1), work._kept
        if other in kept and place[0] > 0:
            values = [t.detach().clone() for t in kept[other].received]
            with torch.no_grad():
                for own, value in zip(kept[place].received, values, strict=True):
                    own.data.copy_(value)
        recompute(work, place)

    return patch.object(Work, "recompute", swapped)


def skipped(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """Nothing is computed again."""
    return patch.object(Work, "recompute", lambda work, place: None)


EVEN = Case(pp=2, steps=1, microbatches=4, rows=8, schedule="GPipe", pipeline=FULL)


@pytest.mark.parametrize("plant", [another_microbatch, kept_inputs_of_another_microbatch])
def test_inputs_of_another_microbatch_are_found(plant: Plant) -> None:
    assert_parity(EVEN)
    with pytest.raises(AssertionError, match=r"^gradients of step 0"):
        assert_parity(EVEN, plant=plant)


def test_a_recompute_that_is_skipped_is_found() -> None:
    with pytest.raises(RankFailure, match="its recompute is missing"):
        assert_parity(EVEN, plant=skipped)


def _forgetful(ctx: Context, case: Case) -> tuple[list[dict[str, Tensor]], int]:
    with fresh_masks(None):  # type: ignore[arg-type]
        return _calls(ctx, case)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_fresh_masks_are_found(schedule: str) -> None:
    case = replace(EVEN, family="gpt2", settings=DROPS, schedule=schedule)
    (right, _), *_ = run_ranks(_calls, 2, case)
    (wrong, _), *_ = run_ranks(_forgetful, 2, case)
    assert any(not torch.equal(right[0][name], wrong[0][name]) for name in right[0])


# -- what is whole in depth ------------------------------------------------------------------------


def with_a_cache(session: Session, case: Case) -> None:
    """Batches that do not say whether a cache is wanted, of a model that keeps one by default."""
    session.model.config.use_cache = True  # type: ignore[union-attr]
    batch: Batch = case.batches()[0]
    session.backward(session.loss(batch))
    session.step()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_cache_is_written_twice(family: Any) -> None:
    assert_parity(Case(family=family, dp=2, steps=1, pipeline=LAYER), scenario=with_a_cache)


def listed(session: Session, case: Case) -> None:
    """Microbatches, each a call of the model, under one backward."""
    batch = case.batches()[0]
    parts = [{name: value[half] for name, value in batch.items()} for half in HALVES]
    whole: Any = parts if isinstance(session, MeshSession) else batch
    session.backward(session.loss(whole))
    session.step()


HALVES = (slice(0, 4), slice(4, 8))


@pytest.mark.parametrize("named", [False, True], ids=["layer", "named"])
def test_listed_microbatches(named: bool) -> None:
    recompute = NAMED["llama"] if named else "layer"
    case = Case(tp=2, steps=1, pipeline=(("recompute", recompute),))
    assert_parity(case, scenario=listed)
    drops = (("attention_dropout", 0.3), DROPS[-1])
    assert all(assert_same(replace(case, settings=drops, pipeline=()), recompute=recompute))


class Tower(nn.Module):
    """Layers in a list, and a loss; no transformers model."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Dropout())])
        self.calls: list[int] = []
        self.layers[0][0].register_forward_pre_hook(lambda *_: self.calls.append(1))  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).sum()


def _gradients(ctx: Context, recompute: Any) -> tuple[dict[str, Tensor], int]:
    """Train a module at ``tp = pp = 1``, and count how often its layer runs."""
    torch.manual_seed(SEED)
    model = Tower()
    runtime = ParallelRuntime(RuntimeConfig(pipeline=PipelineConfig(recompute=recompute)))
    runtime.start(torch.device("cpu"), timeout=DEADLINE)
    try:
        sharded = runtime.shard_module(model)
        loss = model(torch.ones(3, 4))
        with runtime.backward(loss, model):
            loss.backward()
        assert sharded.reducer is not None
        return sharded.reducer.full_gradients(), len(model.calls)
    finally:
        runtime.stop()


@pytest.mark.parametrize("recompute", ["layer", ["layers.*"]])
def test_any_module(recompute: Any) -> None:
    (plain, once), *_ = run_ranks(_gradients, 2, "none")
    (again, twice), *_ = run_ranks(_gradients, 2, recompute)
    assert (once, twice) == (1, 2)
    assert all(torch.equal(again[name], gradient) for name, gradient in plain.items())
