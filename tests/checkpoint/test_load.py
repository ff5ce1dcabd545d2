from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from goose_strategy.checkpoint.load import load_tensors, open_checkpoint
from goose_strategy.checkpoint.state import empty_optimizer_state, optimizer_tensors
from tests.checkpoint.toy import CPU, SHAPES, Toy, make_mesh, same, save_toy
from tests.harness.world import run_ranks

LAYOUTS = [
    (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2),
    (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2),
]  # fmt: skip


def world_of(sizes: tuple[int, int, int]) -> int:
    tp, pp, dp = sizes
    return tp * pp * dp


def load_all(context: Any, sizes: tuple[int, int, int], paths: list[Path]) -> list[bool]:
    mesh = make_mesh(*sizes)
    verdicts = []
    for path in paths:
        expected, toy = Toy.build(mesh), Toy.build(mesh)
        toy.clear()
        checkpoint = open_checkpoint(path, mesh=mesh, weights_only=True)
        toy.state = empty_optimizer_state(
            "optimizer", checkpoint, toy.ranges, toy.specs, device=CPU
        )
        destinations = toy.weight_list() + optimizer_tensors(
            "optimizer", toy.state, toy.specs, mesh=mesh
        )
        load_tensors(checkpoint, destinations, mesh=mesh, identity={"class": "Toy"})
        assert checkpoint.meta == {"step": 3}
        groups = checkpoint.read_objects("optimizer")["param_groups"]
        assert groups[0]["betas"] == (0.9, 0.95)
        assert groups[0]["params"] == list(SHAPES)
        assert toy.state.keys() == expected.state.keys()
        verdicts.append(same(toy.tensors(), expected.tensors()))
    mesh.close()
    return verdicts


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, int], Path]:
    folder = tmp_path_factory.mktemp("saved")
    paths = {sizes: folder / str(sizes) for sizes in LAYOUTS}
    for sizes, path in paths.items():
        run_ranks(save_toy, world_of(sizes), sizes, path)
    return paths


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_any_layout_loads_any_layout(saved: dict[Any, Path], sizes: tuple[int, int, int]) -> None:
    for verdicts in run_ranks(load_all, world_of(sizes), sizes, list(saved.values())):
        assert verdicts == [True] * len(LAYOUTS)
