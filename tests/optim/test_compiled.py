"""Training is the same, bit for bit, whether compiled ops or pure torch step the slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cuda_ops import sources
from cuda_ops.build import build, find_cxx
from cuda_ops.load import library_for
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.optim.narrow import PRESETS, assert_equal, named, natives, start, train, whole

STEPS = 5


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    """The CPU library's folder, kept between runs."""
    if find_cxx() is None:
        pytest.skip("no C++ compiler (g++, c++, clang++ or CXX)")
    if pytestconfig.cache is None:
        pytest.skip("pytest runs without its cache folder, where the library is built")
    made = Path(pytestconfig.cache.mkdir("cuda_ops"))
    build(["cpu"], folder=made)
    return made


def _trained(ctx: Context, zero: dict[str, Any], folder: Path | None) -> tuple[Any, Any, Any]:
    before = sources.folders
    sources.folders = lambda: () if folder is None else (folder,)
    library_for.cache_clear()
    try:
        driver = start(ctx, zero)
        (device,) = {shard.flat.device for shard in natives(driver)}
        assert (library_for(device) is None) == (folder is None)
        train(driver, range(STEPS))
        state = named(driver)
        trace = driver.finish()
        return state, trace.norms, trace.parameters
    finally:
        sources.folders = before
        library_for.cache_clear()


@pytest.mark.parametrize("preset", PRESETS)
def test_compiled_and_pure_torch_train_alike(preset: str, folder: Path) -> None:
    compiled = run_ranks(_trained, 2, PRESETS[preset], folder)
    plain = run_ranks(_trained, 2, PRESETS[preset], None)
    assert_equal(whole([state for state, _, _ in compiled]), whole([s for s, _, _ in plain]))
    for (_, norms, weights), (_, other_norms, other_weights) in zip(compiled, plain, strict=True):
        assert norms == other_norms
        assert same(weights, other_weights)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        bool((left[name] == right[name]).all()) for name in left
    )
