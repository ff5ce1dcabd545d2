"""The noise that is added: where, how much, and that it depends on nothing it should not."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.optim.config import ZeroConfig
from goose_strategy.privacy.noise import Noise, root_from
from goose_strategy.privacy.release import noise_name
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.models import Batch, rows_of
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.parity.grid import Plant, assemble
from tests.parity.session import Pieces
from tests.privacy.oracle import PrivateCase, Seen, pieces, private_call, start
from tests.privacy.test_parity import BATCH

SIGMA, LIMIT, DIVISOR, SEED = 0.7, 3.0, 5, 1234


def noisy(**mesh: object) -> PrivateCase:
    """Return a case with noise that a seed makes known."""
    case = PrivateCase(family="qwen3", tied=True, **mesh)  # type: ignore[arg-type]
    return case.clipped_at(
        LIMIT, noise_multiplier=SIGMA, logical_batch_size=DIVISOR, noise_seed=SEED
    )


NOISY = noisy(dp=2, pp=2, schedule="ZBH1")


def noisy_call(case: PrivateCase, plant: Plant | None = None) -> list[Seen]:
    """Run a private call and its step; return what every rank saw."""
    if plant is None:
        return _noisy_call(case)
    seen: list[Seen] = run_ranks(private_call, case.world_size, case, BATCH, plant)
    return seen


@cache
def _noisy_call(case: PrivateCase) -> list[Seen]:
    seen: list[Seen] = run_ranks(private_call, case.world_size, case, BATCH, None)
    return seen


def drawn(seen: Seen) -> dict[str, tuple[ShardSpec, Tensor]]:
    """Return the noise of one rank in units of its standard deviation."""
    return {
        name: (spec, (noised * DIVISOR - seen.sums[name][1]) / (SIGMA * LIMIT))
        for name, (spec, noised) in seen.noised.items()
    }


def expected(case: PrivateCase, spec: ShardSpec, tp_rank: int) -> Tensor:
    """Return the noise that a slice must have, from its name alone."""
    name = spec.tie if spec.tie is not None else spec.name
    if spec.is_sharded and case.tp > 1:
        name = f"{name}|tp{tp_rank}/{case.tp}"
    field = torch.zeros(spec.numel, dtype=torch.promote_types(spec.dtype, torch.float32))
    Noise(root_from(SEED)).add(field, 1.0, name=name, step=1, start=0)
    return field.view(spec.local_shape)


def assert_noise(case: PrivateCase, ranks: list[Seen]) -> None:
    """Compare every rank's noise with the one its names ask for, and look at its size."""
    assemble([seen.noised for seen in ranks], "noised sums")
    for seen in ranks:
        for name, (spec, noise) in drawn(seen).items():
            wanted = expected(case, spec, seen.place[2])
            assert torch.allclose(noise, wanted, rtol=0, atol=1e-9), f"noise of {name}"


ALL = {"dp": 2, "pp": 2, "tp": 2, "schedule": "ZBH1"}


@pytest.mark.parametrize("mesh", [{}, {"dp": 2}, {"pp": 2}, {"tp": 2}, ALL], ids=str)
def test_noise_is_what_the_names_ask_for_on_every_mesh(mesh: dict[str, object]) -> None:
    case = noisy(**mesh)
    assert_noise(case, noisy_call(case))


@dataclass(frozen=True)
class PresetCase(PrivateCase):
    """A case whose optimizer keeps its state in some precision.

    Attributes:
        preset: See `ZeroConfig`.
    """

    preset: str = "default"

    def config(self) -> RuntimeConfig:
        """Return the settings of the mesh."""
        zero = ZeroConfig(bucket_numel=4096, preset=self.preset)  # type: ignore[arg-type]
        return replace(super().config(), zero=zero)


@pytest.mark.parametrize("preset", ["fp32", "default", "compact"])
def test_every_kind_of_step_gets_the_noise(preset: str) -> None:
    """torch's kernels step some states and ours the others: both read noisy gradients."""
    case = PresetCase(
        family="qwen3", tied=True, pp=2, dp=2, dtype=torch.bfloat16, preset=preset
    ).clipped_at(LIMIT, noise_multiplier=SIGMA, logical_batch_size=DIVISOR, noise_seed=SEED)
    ranks = noisy_call(case)
    assemble([seen.noised for seen in ranks], "noised sums")
    quiet = noisy_call(case.clipped_at(LIMIT, noise_multiplier=0.0))
    for seen, still in zip(ranks, quiet, strict=True):
        moved = 0
        for name, (spec, noise) in drawn(seen).items():
            wanted = expected(case, spec, 0)
            assert torch.allclose(noise, wanted, rtol=0, atol=1e-4), f"noise of {name}"
            moved += int(not torch.equal(seen.parameters[name][1], still.parameters[name][1]))
        assert moved > 0.9 * len(seen.noised), "the step did not read the noise"


def test_noise_has_its_size_for_every_kind_of_parameter_and_rank() -> None:
    kinds = ("embed", "norm", "q_proj", "k_proj", "v_proj", "o_proj", "gate", "up_proj", "down")
    ranks = noisy_call(noisy(**ALL))
    compared = 0
    for rank, seen in enumerate(ranks):
        for kind in kinds:
            parts = [noise.reshape(-1) for name, (_, noise) in drawn(seen).items() if kind in name]
            if not parts:
                continue
            noise = torch.cat(parts)
            error = 3 / math.sqrt(2 * noise.numel())
            spread, mean = float(noise.std()), float(noise.mean())
            assert abs(spread - 1) < error, f"rank {rank}, {kind}: {spread}"
            # The largest of seventy means; one in a thousand seeds goes beyond.
            assert abs(mean) < 4.5 / math.sqrt(noise.numel()), f"rank {rank}, {kind}: {mean}"
            compared += 1
    assert compared >= 8 * 8


def test_noise_of_different_slices_is_uncorrelated() -> None:
    # Every other rank is a replica, which has the same noise.
    ranks = [seen for seen in noisy_call(noisy(**ALL)) if seen.place[1] == 0]
    # Slices of one matrix on two tp ranks, and equal matrices of two layers, and of two stages.
    fields = {
        (rank, name): noise.reshape(-1)
        for rank, seen in enumerate(ranks)
        for name, (spec, noise) in drawn(seen).items()
        if spec.is_sharded and spec.numel >= 512 and spec.tie is None
    }
    keys = sorted(fields)
    worst = 0.0
    for number, one in enumerate(keys):
        for other in keys[number + 1 :]:
            a, b = fields[one], fields[other]
            size = min(a.numel(), b.numel())
            worst = max(worst, abs(float((a[:size] * b[:size]).mean())) * math.sqrt(size))
    # The largest of a few hundred normal numbers.
    assert worst < 5, worst


def steps_of(ctx: Context, case: PrivateCase, batches: list[Batch]) -> Pieces:
    """Train privately for a few steps."""
    runtime = None
    try:
        runtime, handle, optimizer = start(case)
        for batch in batches:
            loss = handle.module(**rows_of(batch, runtime.mesh.dp_rank, case.dp)).loss
            with runtime.backward(loss):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return pieces(handle, dict(handle.module.named_parameters()))
    finally:
        if runtime is not None:
            runtime.stop()


def test_every_step_has_other_noise() -> None:
    case = replace(noisy(), optimizer="sgd")
    two = run_ranks(steps_of, 1, case, [BATCH, BATCH])[0]
    one = run_ranks(steps_of, 1, case, [BATCH])[0]
    from_two_equal_steps = {name: tensor for name, (_, tensor) in two.items()}
    assert any(
        not torch.allclose(tensor, from_two_equal_steps[name]) for name, (_, tensor) in one.items()
    )
    first, second = torch.zeros(4096), torch.zeros(4096)
    noise = Noise(root_from(SEED))
    noise.add(first, 1.0, name="w", step=1, start=0)
    noise.add(second, 1.0, name="w", step=2, start=0)
    assert abs(float((first * second).mean())) < 4 / math.sqrt(4096)


def test_a_parameter_that_no_sample_used_has_noise_too() -> None:
    """Position 100 is beyond every row; its embedding must not show that."""
    case = PrivateCase(family="gpt2", dp=2).clipped_at(
        LIMIT, noise_multiplier=SIGMA, logical_batch_size=DIVISOR, noise_seed=SEED
    )
    for seen in noisy_call(case):
        spec, noised = seen.noised["transformer.wpe.weight"]
        assert not seen.sums["transformer.wpe.weight"][1][100].any()
        wanted = expected(case, spec, 0) * SIGMA * LIMIT / DIVISOR
        assert torch.allclose(noised[100], wanted[100])


def test_a_name_of_noise() -> None:
    whole = ShardSpec.replicated("w", torch.zeros(4))

    class Place:
        tp_size, tp_rank = 2, 1

    place = Place()
    assert noise_name("w", whole, place) == "w"  # type: ignore[arg-type]
    tied = replace(whole, tie="first")
    assert noise_name("w", tied, place) == "first"  # type: ignore[arg-type]
    cut = ShardSpec(
        name="w",
        global_shape=(4,),
        offsets=(2,),
        local_shape=(2,),
        dtype=torch.float32,
        tp_dim=0,
    )
    assert noise_name("w", cut, place) == "w|tp1/2"  # type: ignore[arg-type]
    with nullcontext():
        assert noise_name("w", None, place) == "w"  # type: ignore[arg-type]
