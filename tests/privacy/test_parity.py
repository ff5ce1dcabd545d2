"""Norms and clipped sums are Opacus's: families, meshes, schedules, recomputes, adapters.

The grid takes every family on every mesh with some of everything else; ``-m full`` runs every
combination.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.harness.models import batches
from tests.parity.lora import LAYERS
from tests.privacy import oracle
from tests.privacy.oracle import (
    PrivateCase,
    assert_same,
    reference_call,
    run_call,
    vanilla_gradients,
)

BATCH = batches(1, batch_size=8)[0]
FAMILIES = ("llama", "qwen3", "gpt2", "bloom")
MESHES: tuple[dict[str, int], ...] = (
    {},
    {"tp": 2},
    {"dp": 2},
    {"pp": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 4},
    {"pp": 2, "tp": 2, "dp": 2},
)
SCHEDULES = ("1F1B", "ZBH1", "ZBVZeroBubble", "InterleavedZeroBubble", "Interleaved1F1B")
RECOMPUTES = ("none", "full", "layer")
SHARES = ("none", "some", "all")
NORMS = ("mixed", "ghost", "instantiate")


def case_of(family: Any, *, share: str, recompute: str = "none", **settings: Any) -> PrivateCase:
    """Return a case of which a share of the samples is clipped."""
    per_rank = 1 if settings.get("schedule", "1F1B") in ("1F1B", "ZBH1") else 2
    layers = max(4, settings.get("pp", 1) * per_rank + 1)
    if settings.get("pp", 1) == 1 and recompute == "full":
        recompute = "layer"
    norm = settings.pop("norm", "mixed")
    case = PrivateCase(
        family=family,
        settings=(("layers", layers),),
        pipeline=(("recompute", recompute),),
        **settings,
    )
    return clipped(case, share, norm=norm)


def clipped(case: PrivateCase, share: str, **settings: Any) -> PrivateCase:
    """Return the case with a norm at which none, about 40 %, or all samples are clipped."""
    norms = reference_call(case, BATCH).norms
    limit = {
        "none": 2 * float(norms.max()),
        "some": float(norms.quantile(0.6)),
        "all": 0.5 * float(norms.min()),
    }[share]
    return case.clipped_at(limit, **settings)


def some() -> list[tuple[Any, ...]]:
    """Every family on every mesh, with the rest taking turns."""
    found = []
    for row, mesh in enumerate(MESHES):
        for column, family in enumerate(FAMILIES):
            turn = row + column
            found.append(
                (
                    family,
                    mesh,
                    bool(turn % 2),
                    SCHEDULES[(turn + row) % 5] if mesh.get("pp") else "1F1B",
                    SHARES[(turn + 1) % 3],
                    RECOMPUTES[(2 * column + row) % 3],
                    NORMS[(column + 2 * row) % 3],
                )
            )
    return found


def every() -> Iterator[tuple[Any, ...]]:
    for mesh in MESHES:
        schedules = SCHEDULES if mesh.get("pp") else ("1F1B",)
        yield from itertools.product(
            FAMILIES, (mesh,), (False, True), schedules, SHARES, RECOMPUTES[:2], ("mixed",)
        )


def named(values: tuple[Any, ...]) -> str:
    family, mesh, tied, *rest = values
    sizes = "-".join(f"{axis}{size}" for axis, size in mesh.items()) or "alone"
    return "-".join([family, sizes, "tied" if tied else "untied", *rest])


def check(values: tuple[Any, ...]) -> None:
    family, mesh, tied, schedule, share, recompute, norm = values
    case = case_of(
        family, share=share, recompute=recompute, tied=tied, schedule=schedule, norm=norm, **mesh
    )
    mine, theirs = run_call(case, BATCH), reference_call(case, BATCH)
    over = float((theirs.norms > case.privacy.max_grad_norm).double().mean())
    assert (share, over) in (("none", 0.0), ("all", 1.0)) or 0.2 < over < 0.6
    assert_same(mine, theirs, 1e-9)


@pytest.mark.parametrize("values", some(), ids=named)
def test_opacus_is_matched(values: tuple[Any, ...]) -> None:
    check(values)


@pytest.mark.full
@pytest.mark.parametrize("values", list(every()), ids=named)
def test_opacus_is_matched_by_every_combination(values: tuple[Any, ...]) -> None:
    check(values)


@pytest.mark.parametrize("family", FAMILIES)
def test_opacus_is_matched_in_fp32(family: str) -> None:
    case = case_of(family, share="some", tied=True, pp=2, tp=2, dtype=torch.float32)
    assert_same(run_call(case, BATCH), reference_call(case, BATCH), 1e-5)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2, "tp": 2, "dp": 2}], ids=["tp2", "all"])
def test_adapters(mesh: dict[str, int]) -> None:
    case = clipped(PrivateCase(targets=LAYERS, tied=True, schedule="ZBH1", **mesh), "some")
    assert_same(run_call(case, BATCH), reference_call(case, BATCH), 1e-9)


def test_heads_that_are_fewer_than_the_ranks() -> None:
    """Each of two ranks has a share of one key head's gradient: summed before it is squared."""
    settings = (("num_key_value_heads", 1),)
    case = clipped(PrivateCase(family="qwen2", tp=2, settings=settings), "some")
    assert_same(run_call(case, BATCH), reference_call(case, BATCH), 1e-9)


@pytest.mark.parametrize(
    "mesh", [{"tp": 2}, pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.full)], ids=str
)
def test_a_tied_table_that_every_tp_rank_holds_counts_once(mesh: dict[str, int]) -> None:
    rules = {"model.embed_tokens": "replicated", "lm_head": "replicated"}
    case = clipped(PrivateCase(tied=True, tensor=(("rules", rules),), **mesh), "some")
    assert_same(run_call(case, BATCH), reference_call(case, BATCH), 1e-9)


@pytest.mark.parametrize("family", ["falcon", "gemma", "phi3", "qwen2", "gpt_neox", "mistral"])
def test_further_families(family: Any) -> None:
    case = case_of(family, share="some", tied=True, pp=2, tp=2, schedule="ZBVZeroBubble")
    assert_same(run_call(case, BATCH), reference_call(case, BATCH), 1e-9)


def test_opacus_and_single_rows_are_one_reference() -> None:
    case = PrivateCase(tied=True)
    theirs = vanilla_gradients(case, BATCH)[1]
    with patch.object(oracle, "BY_ROWS", ("llama",)):
        mine = vanilla_gradients(replace(case, rows=9), BATCH)[1]
    for name, value in theirs.items():
        assert torch.allclose(mine[name], value, rtol=1e-9, atol=1e-12), name


def test_a_bound_clips_a_tied_weight_at_least_as_much() -> None:
    case = case_of("llama", share="some", tied=True, pp=2)
    exact = reference_call(case, BATCH)
    bound = run_call(case.clipped_at(case.privacy.max_grad_norm, tied="bound"), BATCH)
    assert bool((bound.norms >= exact.norms * (1 - 1e-9)).all())
    assert bool((bound.norms > exact.norms * (1 + 1e-4)).any()), "the bound is the norm itself"


def test_automatic_clipping_scales_every_sample() -> None:
    case = case_of("llama", share="some", tied=True, pp=2, tp=2)
    limit = case.privacy.max_grad_norm
    mine = run_call(case.clipped_at(limit, clipping="automatic"), BATCH)
    _, gradients = vanilla_gradients(case, BATCH)
    norms = reference_call(case, BATCH).norms
    factors = limit / (norms + 0.01)
    for name, gradient in gradients.items():
        expected = torch.einsum("i,i...->...", factors, gradient)
        assert torch.allclose(mine.sums[name], expected, rtol=1e-9, atol=1e-12), name


def test_clipping_by_stage_bounds_every_stage() -> None:
    case = case_of("llama", share="some", pp=2)
    limit = case.privacy.max_grad_norm
    mine = run_call(case.clipped_at(limit, clipping="per_stage"), BATCH, by_stage=True)
    _, gradients = vanilla_gradients(case, BATCH)
    # What a rank holds is told by which norm its samples have.
    halves: list[list[str]] = [[], []]
    for name in gradients:
        late = name.startswith(("lm_head", "model.norm"))
        late = late or any(name.startswith(f"model.layers.{n}.") for n in (2, 3))
        halves[late].append(name)
    for names in halves:
        squares = [torch.flatten(gradients[name], 1).square().sum(1) for name in names]
        norms = torch.stack(squares).sum(0).sqrt()
        factors = (limit / 2**0.5 / (norms + 1e-6)).clamp(max=1)
        for name in names:
            expected = torch.einsum("i,i...->...", factors, gradients[name])
            assert torch.allclose(mine.sums[name], expected, rtol=1e-9, atol=1e-12), name


def test_uneven_replicas_and_rows_that_fill_up() -> None:
    """Five samples on three replicas' worth of rows: what fills up counts as nothing."""
    case = case_of("llama", share="some", tied=True, dp=2, pp=2)
    mask = torch.tensor([1, 1, 1, 0, 1, 1, 0, 0])
    marked = {**BATCH, "sample_mask": mask}
    mine = run_call(case, marked)
    kept = {name: value[mask > 0] for name, value in BATCH.items()}
    theirs = reference_call(case, kept)
    mine = replace(mine, norms=mine.norms[mask > 0])
    assert_same(mine, theirs, 1e-9)
