"""fp64 parity with one process on every mesh, for every feature of a training step.

Batches always have right padding and unevenly many ignored labels, rows that the microbatches do
not divide, and a vocabulary that no tensor parallel size divides.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from tests.harness.models import Family
from tests.parity.grid import EARLY, FIRST_HALF, HOLES, Case, assert_parity

FAMILIES: tuple[Family, ...] = ("llama", "qwen3")
CLIP = 0.5

SINGLE = [Case(tp=2), Case(tp=4), Case(dp=2), Case(dp=4), Case(tp=2, dp=2)]
STAGED = [
    Case(pp=2),
    Case(pp=4, microbatches=5),
    Case(tp=2, pp=2),
    Case(pp=2, dp=2),
]
CUBE = Case(tp=2, pp=2, dp=2)


def scheduled(cases: list[Case]) -> list[Case]:
    """Return the cases under both schedules."""
    return [replace(case, schedule=schedule) for case in cases for schedule in ("GPipe", "1F1B")]


# Every feature, on and off, in both families on every mesh; the cube has their full product.
SPREAD: dict[Family, list[dict[str, Any]]] = {
    "llama": [
        {"tied": True, "max_norm": CLIP},
        {"accumulate": 2, "frozen": EARLY},
    ],
    "qwen3": [
        {"tied": True, "accumulate": 2},
        {"max_norm": CLIP, "frozen": EARLY},
    ],
}  # fmt: skip
GRID = [
    replace(case, family=family, **features)
    for case in SINGLE + scheduled(STAGED)
    for family in FAMILIES
    for features in SPREAD[family]
]
FULL = [
    replace(case, family=family, tied=tied, max_norm=max_norm, accumulate=accumulate, frozen=frozen)
    for case in scheduled([CUBE])
    for family, tied, max_norm, accumulate, frozen in product(
        FAMILIES, (False, True), (float("inf"), CLIP), (1, 2), ((), EARLY)
    )
]
# mistral's window is shorter than the batches, so that every stage must build that mask, too.
OTHERS = [
    replace(case, family=family, settings=settings, **features)
    for case in scheduled([CUBE])
    for family, settings in (("qwen2", ()), ("mistral", (("sliding_window", 5),)))
    for features in SPREAD["llama"]
]
FROZEN = [
    replace(case, frozen=frozen, tied=tied, max_norm=CLIP)
    for case in scheduled([CUBE])
    for frozen, tied in ((FIRST_HALF, False), (HOLES, True), (("lm_head",), False))
]
BIASED = [
    replace(case, settings=(("attention_bias", True), ("mlp_bias", True)))
    for case in [Case(tp=2), Case(tp=4), CUBE]
]


def test_the_grid_has_every_mesh_with_every_feature_on_and_off() -> None:
    cells: dict[tuple[str, str], list[Case]] = {}
    for case in GRID + FULL:
        cells.setdefault((case.family, case.mesh_name), []).append(case)
    meshes = ["tp2", "tp4", "dp2", "dp4", "tp2-dp2"]
    staged = ["pp2", "pp4", "tp2-pp2", "pp2-dp2", "tp2-pp2-dp2"]
    meshes += [f"{mesh}-{schedule}" for mesh in staged for schedule in ("GPipe", "1F1B")]
    assert cells.keys() == set(product(FAMILIES, meshes))
    for cases in cells.values():
        for feature in ("tied", "max_norm", "accumulate", "frozen"):
            assert len({getattr(case, feature) for case in cases}) == 2


@pytest.mark.parametrize("case", GRID, ids=str)
def test_every_mesh_equals_one_process(case: Case) -> None:
    assert_parity(case)


def halved(cases: list[Case]) -> list[Any]:
    """Leave the half of a full product to `make parity`; the rest still has every triple."""
    return [
        pytest.param(case, marks=pytest.mark.full) if _has_odd_features(case) else case
        for case in cases
    ]


def _has_odd_features(case: Case) -> bool:
    features = (
        case.schedule == "1F1B",
        case.family == "llama",
        case.tied,
        case.max_norm == CLIP,
        case.accumulate == 2,
        bool(case.frozen),
    )
    return sum(features) % 2 == 1


def test_half_of_the_product_has_every_triple() -> None:
    kept = [case for case in FULL if not _has_odd_features(case)]
    assert len(kept) == len(FULL) // 2
    names = ("schedule", "family", "tied", "max_norm", "accumulate", "frozen")
    for three in combinations(names, 3):
        assert len({tuple(getattr(case, name) for name in three) for case in kept}) == 8


@pytest.mark.parametrize("case", halved(FULL), ids=str)
def test_every_feature_on_three_axes(case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_further_families_on_three_axes(case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize("case", FROZEN, ids=lambda case: f"{case}-{case.frozen[-1]}")
def test_frozen_stage_holes_and_head(case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize("case", BIASED, ids=str)
def test_biases_of_row_layers_are_added_once(case: Case) -> None:
    assert_parity(case)
