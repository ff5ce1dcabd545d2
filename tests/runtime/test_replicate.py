"""A user without a seed: rank 0's values everywhere, and one warning."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from goose_strategy.errors import PlanError
from goose_strategy.runtime.replicate import (
    _checksum,
    broadcast_buffers,
    buffer_places,
    equalize,
    share_random_state,
)
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.runtime.start import mesh_of, message


class Mixed(nn.Module):
    """Parameters and buffers of several types; one buffer is derived and not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.randn(()))
        self.register_buffer("flags", torch.rand(4) > 0.5)
        self.register_buffer("derived", torch.randn(3), persistent=False)
        self.register_buffer("empty", torch.empty(0))


def state(module: nn.Module) -> dict[str, Tensor]:
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _without_a_seed(ctx: Context) -> dict[str, Any]:
    torch.manual_seed(100 + ctx.rank)
    module = Mixed()
    with mesh_of(tp=2) as mesh, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        different = equalize(module, mesh)
        again = equalize(module, mesh)
    return {
        "different": different,
        "again": again,
        "warnings": [str(w.message) for w in caught],
        "state": state(module),
    }


def test_without_a_seed_rank_zeros_values_are_everywhere() -> None:
    first, second = run_ranks(_without_a_seed, 2)
    torch.manual_seed(100)
    expected = state(Mixed())
    for rank in (first, second):
        assert rank["again"] == 0
        assert all(torch.equal(rank["state"][name], value) for name, value in expected.items())
    assert first["different"] == second["different"] >= 5
    assert second["warnings"] == []
    assert len(first["warnings"]) == 1
    assert "differed between ranks (first: narrow)" in first["warnings"][0]
    assert "seed_everything" in first["warnings"][0]


def _with_a_seed(ctx: Context) -> int:
    torch.manual_seed(3)
    with mesh_of(dp=2) as mesh:
        return equalize(Mixed(), mesh)


def test_with_a_seed_nothing_is_sent_and_nobody_is_warned() -> None:
    assert run_ranks(_with_a_seed, 2) == [0, 0]


def _different_structure(ctx: Context) -> list[str]:
    found = []
    for make in (
        lambda: nn.Linear(2, 2 + ctx.rank),
        lambda: nn.Linear(2, 2, bias=bool(ctx.rank)),
        lambda: nn.Linear(2, 2, dtype=torch.float64 if ctx.rank else torch.float32),
        lambda: nn.ModuleDict({"ab"[ctx.rank]: nn.Linear(2, 2)}),
    ):
        module = make()
        with mesh_of(pp=2) as mesh:
            found.append(
                message(lambda module=module, mesh=mesh: equalize(module, mesh), PlanError)
            )
    return found


def test_different_modules_are_refused_on_all_ranks() -> None:
    for rank in run_ranks(_different_structure, 2):
        assert len(rank) == 4
        assert all("The ranks built different modules" in text for text in rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
def test_a_checksum_sees_every_bit_and_place(dtype: torch.dtype) -> None:
    values = torch.arange(1, 13).to(dtype).view(3, 4)
    reference = _checksum(values)
    changed = values.clone()
    changed[1, 2] += 1
    assert not torch.equal(_checksum(changed), reference)
    assert not torch.equal(_checksum(values.flip(1)), reference)
    assert torch.equal(_checksum(values.clone()), reference)
    assert torch.equal(_checksum(values.t().contiguous().t()), reference)
    assert _checksum(values.to("meta")).item() == 0
    assert _checksum(torch.tensor([True, False])).item() != 0


def test_buffers_that_a_state_dict_holds_are_found_in_place() -> None:
    module = Mixed()
    places = [(type(owner).__name__, name) for owner, name in buffer_places(module)]
    batch_norm = ["running_mean", "running_var", "num_batches_tracked"]
    assert sorted(places) == sorted(
        [("Mixed", "flags"), ("Mixed", "empty"), *(("BatchNorm1d", name) for name in batch_norm)]
    )


def _buffers(ctx: Context) -> dict[str, Tensor]:
    torch.manual_seed(ctx.rank)
    module = Mixed()
    places = buffer_places(module)
    module.flags = torch.tensor([bool(ctx.rank)])  # another tensor in the same place
    module.inner[1].running_mean.fill_(ctx.rank)
    with mesh_of(dp=2) as mesh:
        broadcast_buffers(places, mesh)
    with mesh_of(tp=2) as mesh:
        broadcast_buffers([(module, "derived")], mesh)  # one replica: nothing to share
    return state(module)


def test_buffers_are_those_of_the_first_replica() -> None:
    first, second = run_ranks(_buffers, 2)
    assert torch.equal(second["flags"], torch.tensor([False]))
    assert torch.equal(first["inner.1.running_mean"], second["inner.1.running_mean"])
    assert not torch.equal(first["derived"], second["derived"])
    assert not torch.equal(first["narrow"], second["narrow"]), "parameters are none of its business"


def _random_states(ctx: Context) -> tuple[list[float], list[float]]:
    torch.manual_seed(ctx.rank)
    with mesh_of(pp=2) as mesh:
        share_random_state(mesh)
    alone = torch.rand(2).tolist()
    with mesh_of(tp=2) as mesh:
        share_random_state(mesh)
    return alone, torch.rand(2).tolist()


def test_tp_ranks_drop_the_same_elements() -> None:
    first, second = run_ranks(_random_states, 2)
    assert first[0] != second[0], "stages draw numbers of their own"
    assert first[1] == second[1]
