"""fp32, bf16-mixed and bf16-true on the mesh, against one process in fp64.

The reference starts from the case's own rounded weights. In fp32 the distance itself is bounded.
In bf16 one process is percents off already, so the mesh may be off by a small multiple of what one
process in the same precision is: as many roundings, in another order. SGD with momentum is used
where several steps are compared, because the first steps of AdamW turn the smallest differences
of gradients into signs, in one process as on a mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from tests.harness.compare import assert_close_numbers, relative_error
from tests.parity.grid import (
    Bounds,
    Case,
    Plant,
    about,
    assert_parity,
    reference_of,
    run_case,
    train,
)
from tests.parity.session import OneProcess, Record
from tests.parity.test_planted import (
    gradients_averaged_over_replicas,
    microbatch_without_backward,
)

MESHES = [Case(tp=2), Case(pp=2), Case(dp=2), Case(tp=2, pp=2, dp=2)]
CASES = [
    replace(
        case, family=family, tied=family == "llama", max_norm=0.5, accumulate=2, optimizer="sgd"
    )
    for case in MESHES
    for family in ("llama", "qwen3")
]
BF16 = {
    "mixed": {"dtype": torch.float32, "autocast": torch.bfloat16},
    "true": {"dtype": torch.bfloat16},
}

# Measured: losses 1.6e-7, norms 2.7e-7, gradients 3.0e-6, parameters 1.0e-7.
FP32 = Bounds(loss=1e-6, gradient=1e-5, parameter=1e-6)


@dataclass(frozen=True)
class Loose:
    """Bounds in bf16: of losses and norms from fp64, of tensors in multiples of one process."""

    loss: float
    norm: float
    gradients: float
    parameters: float


# Measured over all cases and steps: losses 7.4e-4, norms 4.4e-3 (one process: 5.1e-4 and 5.8e-3),
# gradients 2.6 and parameters 1.7 times as far off as one process.
LOOSE = Loose(loss=2e-3, norm=1e-2, gradients=4.0, parameters=3.0)


def name_of(case: Case) -> str:
    return f"{case}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_fp32(case: Case) -> None:
    assert_parity(replace(case, dtype=torch.float32), FP32)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_first_step_of_adamw_in_fp32(family: str) -> None:
    case = Case(family, tp=2, pp=2, dp=2, dtype=torch.float32, steps=1)  # type: ignore[arg-type]
    assert_parity(case, replace(FP32, parameter=1e-4))


@pytest.mark.parametrize("precision", BF16)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_bf16_is_as_close_to_fp64_as_one_process_is(case: Case, precision: str) -> None:
    assert_as_close_as_one(replace(case, **BF16[precision]), LOOSE)


@pytest.mark.parametrize("mesh", [Case(dp=2), Case(tp=2, pp=2, dp=2)], ids=name_of)
def test_steps_below_the_spacing_of_bf16_add_up_in_the_main_weights(mesh: Case) -> None:
    case = replace(mesh, dtype=torch.bfloat16, optimizer="slow", steps=20)
    reference = reference_of(case)
    run = run_case(case)
    main, stuck = one_process(case, torch.float32), one_process(case, torch.bfloat16)
    errors = [distance(one.parameters, reference.parameters) for one in (run, main, stuck)]
    # Weights that are stepped in bf16 themselves hardly move.
    assert errors[2] > 3 * errors[1]
    assert errors[0] < 1.1 * errors[1]


PLANTS = [microbatch_without_backward, gradients_averaged_over_replicas]


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_bounds_are_close_enough_to_catch_a_planted_error(plant: Plant) -> None:
    fp32 = replace(CASES[-1], dtype=torch.float32)
    with pytest.raises(AssertionError, match="gradients of step 0"):
        assert_parity(replace(fp32, steps=1), FP32, plant=plant)
    for precision in BF16.values():
        with pytest.raises(AssertionError, match="gradients of step 0"):
            assert_as_close_as_one(replace(fp32, steps=1, **precision), LOOSE, plant)


@cache
def one_process(case: Case, main: torch.dtype = torch.float32) -> Record:
    """Train in one process in the case's precision, with main weights of type ``main``."""
    session = OneProcess(
        case.alone.model(), optimizer=case.optimizer, main=main, autocast=case.autocast
    )
    train(session, case.alone)
    return session.finish()


def assert_as_close_as_one(case: Case, loose: Loose, plant: Plant | None = None) -> None:
    """Compare the mesh and one process in the case's precision with one process in fp64."""
    reference, run = reference_of(case), run_case(case, plant=plant)
    one = one_process(case.alone)
    with about("losses"):
        assert_close_numbers(run.losses, reference.losses, loose.loss)
    for step, exact in enumerate(reference.gradients):
        mine, theirs = run.gradients[step], one.gradients[step]
        with about(f"gradients of step {step}"):
            assert_not_much_further(mine, theirs, exact, loose.gradients)
    with about("norms"):
        assert_close_numbers(run.norms, reference.norms, loose.norm)
    with about("parameters"):
        exact = reference.parameters
        assert_not_much_further(run.parameters, one.parameters, exact, loose.parameters)


def assert_not_much_further(
    mine: dict[str, Tensor], one: dict[str, Tensor], exact: dict[str, Tensor], times: float
) -> None:
    """Assert that no tensor of ``mine`` is more than ``times`` as far off as that of ``one``."""
    assert mine.keys() == one.keys() == exact.keys()
    for name, value in exact.items():
        ours, theirs = relative_error(mine[name], value), relative_error(one[name], value)
        # What is frozen must stay exact.
        assert theirs > 0 or ours == 0, f"{name}: one process in low precision is exact"
        assert ours <= times * theirs, f"{name}: {ours:.2e} off, one process {theirs:.2e}"


def distance(mine: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the relative distance of all tensors together."""

    def flat(tensors: dict[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].double().flatten() for name in exact])

    return relative_error(flat(mine), flat(exact))
