"""What one layout saved, every other one loads: weights and optimizer states, to the last bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from goose_strategy.checkpoint.load import open_checkpoint
from goose_strategy.checkpoint.manifest import LocalTensor
from goose_strategy.checkpoint.save import Contents, save_checkpoint
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.model import ShardedModel
from goose_strategy.runtime.state import (
    identity_of,
    load_model_and_optimizers,
    model_tensors,
    optimizer_contents,
)
from tests.harness.compare import token_loss
from tests.harness.models import Family, batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import started

Sizes = tuple[int, int, int]
Whole = dict[str, tuple[tuple[int, ...], list[Any]]]
CUBE: Sizes = (2, 2, 2)
LAYOUTS = [sizes for sizes in product((1, 2, 4), repeat=3) if torch.Size(sizes).numel() <= 8]
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {"family": "llama", "kv_heads": 4},
    "tied": {"family": "llama", "kv_heads": 4, "tied": True},
}
BF16 = {"dtype": torch.bfloat16}


def ranks_of(sizes: Sizes) -> int:
    return torch.Size(sizes).numel()


def adamw(model: nn.Module) -> Optimizer:
    """With two groups, so that groups are put together from the stages, too."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    other = [p for p in model.parameters() if p.dim() <= 1]
    return AdamW([{"params": decay}, {"params": other, "weight_decay": 0.0}], lr=1e-2)


def shard(runtime: ParallelRuntime, **variant: Any) -> tuple[ShardedModel, Optimizer]:
    model = tiny_model(**{"dtype": torch.float32, **variant})
    optimizer = adamw(model)
    return runtime.shard_module(model, optimizers=[optimizer]), optimizer


def step(runtime: ParallelRuntime, handle: ShardedModel, number: int) -> float:
    """Take one step of a run; return its loss."""
    mesh = runtime.mesh
    batch = rows_of(batches(number + 1, batch_size=8)[number], mesh.dp_rank, mesh.dp_size)
    loss = handle.module(**batch).loss
    with runtime.backward(loss):
        loss.backward()
    for optimizer in handle.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    value: float = loss.item()
    return value


def save(runtime: ParallelRuntime, path: Path, handle: ShardedModel, optimizer: Optimizer) -> None:
    tensors, objects = optimizer_contents("optimizer", handle, optimizer)
    contents = Contents(
        tensors=[*model_tensors("model", handle), *tensors],
        objects=objects,
        identity=identity_of(handle),
    )
    save_checkpoint(path, contents, mesh=runtime.mesh)


def load(runtime: ParallelRuntime, path: Path, handle: ShardedModel, optimizer: Optimizer) -> None:
    checkpoint = open_checkpoint(path, mesh=runtime.mesh)
    entries = {"optimizer": (handle, optimizer)}
    load_model_and_optimizers(
        checkpoint, {"model": handle}, entries, mesh=runtime.mesh, strict=True
    )


def held(handle: ShardedModel, optimizer: Optimizer) -> Whole:
    """Return this rank's part of weights and states, by key of a checkpoint."""
    states, _ = optimizer_contents("optimizer", handle, optimizer)
    return {t.key: (t.global_shape, copied(t)) for t in [*model_tensors("model", handle), *states]}


def copied(tensor: LocalTensor) -> list[Any]:
    return [(box, piece.detach().clone()) for box, piece in tensor.pieces]


def put_together(ranks: list[Whole]) -> dict[str, Tensor]:
    """Assemble whole tensors; what two ranks hold must be the same to the last bit."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for rank in ranks:
        for key, (shape, pieces) in rank.items():
            for box, piece in pieces:
                target = whole.setdefault(key, torch.zeros(shape, dtype=piece.dtype))
                mask = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))
                place = tuple(slice(at, at + n) for at, n in zip(*box, strict=True))
                assert not mask[place].any() or torch.equal(target[place], piece), key
                target[place], mask[place] = piece, True
    assert all(mask.all() for mask in filled.values())
    return whole


def _saved(_ctx: Context, sizes: Sizes, path: Path, variants: Any) -> list[Whole]:
    found = []
    for name, variant in variants.items():
        with started(*sizes[:2]) as runtime:
            handle, optimizer = shard(runtime, **variant)
            for number in range(2):
                step(runtime, handle, number)
            save(runtime, path / name, handle, optimizer)
            found.append(held(handle, optimizer))
    return found


def _loaded(_ctx: Context, sizes: Sizes, path: Path, variants: Any) -> list[tuple[Whole, float]]:
    found = []
    for name, variant in variants.items():
        with started(*sizes[:2]) as runtime:
            handle, optimizer = shard(runtime, **variant, seed=1)
            load(runtime, path / name, handle, optimizer)
            now = held(handle, optimizer)
            found.append((now, step(runtime, handle, 2)))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Tensor]]]:
    path = tmp_path_factory.mktemp("saved")
    ranks = run_ranks(_saved, ranks_of(CUBE), CUBE, path, VARIANTS)
    return path, [put_together([rank[i] for rank in ranks]) for i in range(len(VARIANTS))]


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_any_layout_loads_what_two_by_two_by_two_saved(saved: Any, sizes: Sizes) -> None:
    # In nanotron's issue 106 another tp ended in a KeyError.
    path, expected = saved
    ranks = run_ranks(_loaded, ranks_of(sizes), sizes, path, VARIANTS)
    for index, whole in enumerate(expected):
        found = put_together([rank[index][0] for rank in ranks])
        assert found.keys() == whole.keys()
        assert any("exp_avg_sq" in key for key in found)
        wrong = [key for key, value in whole.items() if not torch.equal(found[key], value)]
        assert not wrong
        assert len({rank[index][1] for rank in ranks}) == 1


def _saved_as(_ctx: Context, schedule: str, path: Path) -> Whole:
    with started(1, 2, schedule=schedule) as runtime:
        handle, optimizer = shard(runtime, **VARIANTS["tied"])
        for number in range(2):
            step(runtime, handle, number)
        save(runtime, path, handle, optimizer)
        return held(handle, optimizer)


def _loaded_as(_ctx: Context, schedule: str, path: Path) -> tuple[Whole, float]:
    with started(1, 2, schedule=schedule) as runtime:
        handle, optimizer = shard(runtime, **VARIANTS["tied"], seed=1)
        load(runtime, path, handle, optimizer)
        now = held(handle, optimizer)
        return now, step(runtime, handle, 2)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        # The head and the embedding are one tensor of one rank, and two copies on two ranks.
        ("ZBVZeroBubble", "Interleaved1F1B"),
        ("Interleaved1F1B", "1F1B"),
        ("1F1B", "ZBVZeroBubble"),
    ],
)
def test_any_order_of_stages_loads_what_another_saved(
    saving: str, loading: str, tmp_path: Path
) -> None:
    expected = put_together(run_ranks(_saved_as, 2, saving, tmp_path / "saved"))
    ranks = run_ranks(_loaded_as, 2, loading, tmp_path / "saved")
    found = put_together([whole for whole, _ in ranks])
    assert found.keys() == expected.keys()
    assert not [key for key, value in expected.items() if not torch.equal(found[key], value)]
    again = run_ranks(_loaded_as, 2, saving, tmp_path / "saved")
    assert {loss for _, loss in ranks} == {loss for _, loss in again}


def test_there_are_all_layouts_of_one_two_four_and_eight_ranks() -> None:
    assert [sum(ranks_of(s) == n for s in LAYOUTS) for n in (1, 2, 4, 8)] == [1, 3, 6, 7]


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_one_process_goes_on_with_torch_alone(family: Family, tied: bool, tmp_path: Path) -> None:
    """The consolidated file goes into a plain model and a plain AdamW, which take the same step."""
    variants = {"one": {"family": family, "tied": tied, "dtype": torch.float64}}
    run_ranks(_saved, ranks_of(CUBE), CUBE, tmp_path, variants)
    content = _load_distributed_checkpoint(tmp_path / "one")
    model = tiny_model(family, tied=tied, seed=1)
    optimizer = adamw(model)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    # torch takes states over by position, whatever their shape.
    for param, state in optimizer.state.items():
        assert state["exp_avg"].shape == param.shape
    expected = run_ranks(_one_more, ranks_of(CUBE), CUBE, tmp_path, variants)
    (batch,) = batches(3, batch_size=8)[2:]
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    loss = token_loss(logits, batch["labels"])
    loss.backward()
    optimizer.step()
    whole = put_together([rank[0] for rank in expected])
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.detach(), whole[f"model.{name}"], rtol=1e-9, atol=1e-12)


def _one_more(_ctx: Context, sizes: Sizes, path: Path, variants: Any) -> list[Whole]:
    found = []
    for name, variant in variants.items():
        with started(*sizes[:2]) as runtime:
            handle, optimizer = shard(runtime, **variant, seed=1)
            load(runtime, path / name, handle, optimizer)
            step(runtime, handle, 2)
            found.append(held(handle, optimizer))
    return found
