from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from goose_strategy.checkpoint.folder import META_FILE, PICKLED_FILE
from goose_strategy.checkpoint.load import load_tensors, open_alone, open_checkpoint
from goose_strategy.checkpoint.manifest import LocalTensor
from goose_strategy.checkpoint.state import empty_optimizer_state, optimizer_tensors
from goose_strategy.errors import CheckpointError
from goose_strategy.mesh.shard import ShardSpec
from tests.checkpoint.toy import (
    BUFFER,
    CPU,
    EMBED,
    HEAD,
    SHAPES,
    Toy,
    attempt,
    make_mesh,
    same,
    save_toy,
    whole,
)
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


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    # The zip format of meta.pt has padding, where a flip means nothing: aim at its values.
    at = data.find(b"layout")
    data[len(data) // 2 if at < 0 else at] ^= 4
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "truncated": truncate,
    "flipped": flip,
}
FILES = ["__1_0.distcp", ".metadata", META_FILE, PICKLED_FILE]


def load_damaged(context: Any, path: Path) -> tuple[str, bool]:
    mesh = make_mesh(1, 1, 2)
    toy = Toy.build(mesh)
    toy.clear()

    def step() -> None:
        checkpoint = open_checkpoint(path, mesh=mesh, weights_only=False)
        load_tensors(checkpoint, toy.weight_list(), mesh=mesh, strict=False)

    message = attempt(step)
    mesh.close()
    return message, all(tensor.isnan().all() for tensor in toy.tensors())


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named_and_nothing_is_loaded(
    saved_pickled: Path, tmp_path: Path, file: str, kind: str
) -> None:
    path = tmp_path / "damaged"
    shutil.copytree(saved_pickled, path)
    size = (path / file).stat().st_size
    DAMAGE[kind](path / file)
    results = run_ranks(load_damaged, 2, path)
    assert results[0] == results[1]
    message, untouched = results[0]
    assert untouched
    assert file in message
    if kind == "truncated" and file != META_FILE:
        assert f"size={size - 7} " in message and f"size={size}" in message


@pytest.fixture(scope="module")
def saved_pickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pickled") / "checkpoint"
    run_ranks(save_pickled, 2, path)
    return path


def save_pickled(context: Any, path: Path) -> None:
    save_toy(context, (1, 1, 2), path, home=Path("/home"))


def load_other_model(context: Any, path: Path, change: str) -> tuple[str, bool, tuple[Any, ...]]:
    mesh = make_mesh(1, 2, 1)
    toy = Toy.build(mesh)
    toy.clear()
    wanted = toy.weight_list()
    identity = {"class": "Toy"}
    # Only one rank sees the difference; all have to learn of it.
    if change == "class":
        identity = {"class": "Another"}
    elif change == "name" and mesh.rank == 1:
        wanted[0] = LocalTensor.whole(("model", "layers.9.norm.weight"), torch.zeros(6))
    elif change == "shape" and mesh.rank == 1:
        wanted[0] = LocalTensor.whole(wanted[0].path, torch.zeros(3, 3))
    elif change == "dtype" and mesh.rank == 1:
        wanted[0] = LocalTensor.whole(wanted[0].path, wanted[0].pieces[0][1].to(torch.int64))
    checkpoint = open_checkpoint(path, mesh=mesh)

    def load(*, strict: bool = True) -> Any:
        return load_tensors(checkpoint, wanted, mesh=mesh, identity=identity, strict=strict)

    message = attempt(load)
    untouched = all(tensor.isnan().all() for tensor in toy.tensors())
    mismatch = load(strict=False) if change in ("class", "name") else ()
    mesh.close()
    return message, untouched, tuple(mismatch and (mismatch.missing, mismatch.unexpected))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("class", ["class='Another' here, class='Toy' in the checkpoint"]),
        (
            "name",
            [
                "model.layers.9.norm.weight is not in the checkpoint",
                "model.layers.2.column.weight is in the checkpoint only",
            ],
        ),
        ("shape", ["model.layers.2.column.weight has shape=(3, 3) here, shape=(8, 6) in the"]),
        ("dtype", ["model.layers.2.column.weight has dtype=torch.int64 here, dtype=torch.float32"]),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_all(
    saved: dict[Any, Path], change: str, said: list[str]
) -> None:
    results = run_ranks(load_other_model, 2, saved[1, 1, 1], change)
    assert results[0] == results[1]
    message, untouched, mismatch = results[0]
    assert "of another model" in message
    assert all(text in message for text in said)
    assert untouched
    if change == "name":
        assert mismatch == (("model.layers.9.norm.weight",), ("model.layers.2.column.weight",))


def open_nothing(context: Any, folder: Path) -> list[str]:
    mesh = make_mesh(1, 1, 2)
    names = ["nowhere", "empty", "file", "lightning", "list"]
    said = [attempt(lambda p=folder / name: open_checkpoint(p, mesh=mesh)) for name in names]
    mesh.close()
    return said


def test_what_is_no_finished_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "lightning").mkdir()
    torch.save({"step": 1}, tmp_path / "lightning" / META_FILE)
    torch.save([1], tmp_path / "list")
    one, other = run_ranks(open_nothing, 2, tmp_path)
    assert one == other
    assert "does not exist" in one[0]
    assert f"no {META_FILE}, which is written last" in one[1]
    assert "cannot be loaded" in one[2]
    assert "was not written by goose-strategy" in one[3]
    assert "holds a list" in one[4]


def load_tied_as_untied(context: Any, path: Path) -> bool:
    """An alias can be loaded as a tensor of its own, and need not be."""
    mesh = make_mesh(1, 1, 1)
    toy = Toy.build(mesh)
    head = torch.zeros(10, 6)
    wanted = [*toy.weight_list(), LocalTensor.whole(("model", "head.weight"), head)]
    load_tensors(open_checkpoint(path, mesh=mesh), wanted, mesh=mesh)
    mesh.close()
    return torch.equal(head, toy.weights[EMBED])


def test_an_alias_loads_as_a_tensor_of_its_own(saved: dict[Any, Path]) -> None:
    assert run_ranks(load_tied_as_untied, 1, saved[1, 1, 1]) == [True]


def load_as_bf16(context: Any, path: Path) -> bool:
    mesh = make_mesh(1, 1, 1)
    name = "layers.0.row.weight"
    weight = torch.zeros(6, 8, dtype=torch.bfloat16)
    wanted = [LocalTensor.whole(("model", name), weight)]
    load_tensors(open_checkpoint(path, mesh=mesh), wanted, mesh=mesh, strict=False)
    expected = Toy.build(mesh).weights[name].bfloat16()
    mesh.close()
    return torch.equal(weight, expected)


def test_another_float_dtype_is_cast_as_load_state_dict_does(saved: dict[Any, Path]) -> None:
    assert run_ranks(load_as_bf16, 1, saved[1, 1, 1]) == [True]


def load_single(context: Any, path: Path) -> tuple[bool, Any]:
    mesh = make_mesh(2, 1, 2)
    expected, toy = Toy.build(mesh), Toy.build(mesh)
    toy.clear()
    checkpoint = open_checkpoint(path, mesh=mesh)
    toy.state = empty_optimizer_state("optimizer_0", checkpoint, toy.ranges, toy.specs, device=CPU)
    destinations = optimizer_tensors("optimizer_0", toy.state, toy.specs, mesh=mesh)
    load_tensors(checkpoint, toy.weight_list() + destinations, mesh=mesh)
    mesh.close()
    return same(toy.tensors(), expected.tensors()), checkpoint.read_objects("optimizer_0")


def test_a_single_file_of_the_trainer_loads_into_a_layout(tmp_path: Path) -> None:
    """Consolidated files, and those of one process, hold whole tensors under the same names."""
    groups = [{"lr": 0.5, "params": list(SHAPES)}]
    state = {
        name: {key: whole(name, tag=key) for key in ("exp_avg", "exp_avg_sq")}
        | {"step": torch.tensor(3.0)}
        for name in SHAPES
    }
    content = {
        "epoch": 1,
        "state_dict": {name: whole(name) for name in SHAPES}
        | {BUFFER: whole(BUFFER, tag=""), HEAD: whole(EMBED)},
        "optimizer_states": [{"state": state, "param_groups": groups}],
    }
    torch.save(content, tmp_path / "single.ckpt")
    expected = (True, {"param_groups": groups})
    assert run_ranks(load_single, 4, tmp_path / "single.ckpt") == [expected] * 4


def load_foreign_optimizer(context: Any, path: Path) -> str:
    """The optimizer of a model of which this one knows no name."""
    mesh = make_mesh(1, 1, 2)
    checkpoint = open_checkpoint(path, mesh=mesh)
    ranges = {"another": (0, 3)}
    specs = {"another": ShardSpec.replicated("another", torch.zeros(3))}
    state = empty_optimizer_state("optimizer", checkpoint, ranges, specs, device=CPU)
    assert state == {}
    message = attempt(lambda: load_tensors(checkpoint, [], mesh=mesh, entries=["optimizer"]))
    mesh.close()
    return message


def test_an_optimizer_state_is_not_dropped_silently(saved: dict[Any, Path]) -> None:
    one, other = run_ranks(load_foreign_optimizer, 2, saved[1, 1, 1])
    assert one == other
    assert "optimizer.state.embed.weight.exp_avg is in the checkpoint only" in one
    assert "and 58 more" in one


def test_one_process_opens_what_many_wrote(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    run_ranks(save_toy, 4, (2, 2, 1), path)
    checkpoint = open_alone(path)
    stored = checkpoint.tensors[f"model.{EMBED}"]
    out = torch.empty(stored.shape)
    checkpoint.read([LocalTensor.whole(stored.path, out)])
    assert torch.equal(out, whole(EMBED))
    assert f"model.{HEAD}" in checkpoint.tensors
    data = max(path.glob("*.distcp"), key=lambda file: file.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[-1] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CheckpointError, match="crc32"):
        open_alone(path)
    open_alone(path, verify=False)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_alone(tmp_path / "absent")
