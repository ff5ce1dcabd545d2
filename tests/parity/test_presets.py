"""Narrow optimizer states on whole meshes: tied copies, every axis, late gathers, the wire."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.optim import native
from tests.harness.compare import relative_error
from tests.parity.grid import Bounds, Case, assert_parity, reference_of, run_case
from tests.parity.session import OPTIMIZERS

BF16 = torch.bfloat16
CUBE = Case(tp=2, pp=2, dp=2)
ALONE = (("main", "bf16"), ("exp_avg", "bf16"), ("exp_avg_sq", "bf16"))
COMPACT = (("preset", "compact"),)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("zero", [ALONE, COMPACT], ids=["alone", "compact"])
@pytest.mark.parametrize("mesh", [Case(pp=2), Case(tp=2, pp=2)], ids=str)
def test_tied_copies_stay_equal_over_fifty_stochastic_steps(mesh: Case, zero: Any) -> None:
    """`run_case` asserts that two ranks with the same elements hold the same bits."""
    case = replace(mesh, tied=True, dtype=BF16, steps=50, zero=zero, max_norm=1.0, rows=4)
    run = run_case(replace(case, microbatches=2))
    assert run.losses[-1] < run.losses[0]


@contextmanager
def keys_of_their_own(mesh: ParallelMesh) -> Iterator[None]:
    """Let every rank round by random numbers of its own."""
    kept = native.rounding_key
    native.rounding_key = lambda name, tp_rank=None: kept(f"{name} {mesh.rank}", tp_rank)
    try:
        yield
    finally:
        native.rounding_key = kept


def test_copies_that_round_by_other_numbers_are_noticed() -> None:
    case = Case(pp=2, tied=True, dtype=BF16, steps=10, zero=ALONE, microbatches=2)
    with pytest.raises(AssertionError, match=r"two ranks hold different values of .*(embed|head)"):
        run_case(case, plant=keys_of_their_own)


@pytest.mark.parametrize(
    "zero", [(("preset", "default"),), COMPACT, ALONE], ids=["default", "compact", "alone"]
)
def test_every_preset_trains_on_every_axis(zero: Any) -> None:
    case = replace(CUBE, dtype=BF16, tied=True, steps=8, zero=zero, max_norm=0.5, accumulate=2)
    run, reference = run_case(case), reference_of(case)
    for name, exact in reference.parameters.items():
        moved = relative_error(case.alone.model().get_parameter(name).double(), exact)
        assert relative_error(run.parameters[name], exact) < 0.35 * moved + 6e-3, name
    for mine, exact in zip(run.losses, reference.losses, strict=True):
        assert mine == pytest.approx(exact, rel=5e-3)


def test_fp32_by_our_own_step_equals_one_process() -> None:
    case = replace(CUBE, dtype=torch.float32, optimizer="sgd", max_norm=0.5, tied=True)
    bounds = Bounds(loss=1e-6, gradient=1e-5, parameter=1e-6)
    assert_parity(replace(case, zero=(("skip_nonfinite", True),)), bounds)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("native_step", [False, True], ids=["torch", "native"])
def test_fifty_clipped_steps_of_two_groups_are_those_of_torch(native_step: bool) -> None:
    """Torch's AdamW, given what the mesh's replicas and stages agreed on, comes to its weights."""
    zero = (("skip_nonfinite", True),) if native_step else ()
    case = replace(CUBE, dtype=torch.float32, optimizer="grouped", steps=50, rows=4, zero=zero)
    run = run_case(replace(case, max_norm=0.5, microbatches=2))
    model = case.model()
    weights = dict(model.named_parameters())
    optimizer = OPTIMIZERS["grouped"](list(weights.values()))
    for gradients, norm in zip(run.gradients, run.norms, strict=True):
        factor = min(1.0, 0.5 / (norm + 1e-6))
        for name, weight in weights.items():
            weight.grad = gradients[name].to(weight.dtype) * factor
        optimizer.step()
    assert any(norm > 0.5 for norm in run.norms)
    for name, weight in weights.items():
        assert relative_error(run.parameters[name], weight.detach()) < 1e-7, name


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_weights_that_are_gathered_late_are_there_in_time(schedule: str) -> None:
    case = replace(CUBE, schedule=schedule, max_norm=0.5, accumulate=2, tied=True)
    assert_parity(replace(case, zero=(("overlap_param_gather", True), ("bucket_numel", 2048))))


def test_bf16_on_the_wire_is_as_good_as_bf16() -> None:
    case = replace(CUBE, dtype=torch.float32, optimizer="sgd", zero=(("wire", "bf16"),))
    run, reference = run_case(case), reference_of(case)
    for name, exact in reference.gradients[0].items():
        assert relative_error(run.gradients[0][name], exact) < 2**-8, name
    for name, exact in reference.parameters.items():
        assert relative_error(run.parameters[name], exact) < 1e-3, name


@contextmanager
def warned(mesh: ParallelMesh) -> Iterator[None]:
    """Expect the warning on rank 0."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [w for w in caught if "rounds the accumulated gradients" in str(w.message)]
    assert len(said) == (mesh.rank == 0)


def test_gradients_in_bf16_cost_what_they_save() -> None:
    case = replace(CUBE, dtype=BF16, optimizer="sgd", microbatches=2)
    reference = reference_of(case)
    narrow = run_case(replace(case, zero=(("grads", "bf16"),)), plant=warned)
    wide = run_case(case)
    for name, exact in reference.gradients[0].items():
        error = relative_error(wide.gradients[0][name], exact)
        assert relative_error(narrow.gradients[0][name], exact) < 3 * error + 2**-7, name
