"""What a step allocates beside the state: less than one bucket, and no fp32 copy of anything."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from cuda_ops.load import library_for
from goose_strategy.optim.clip import clip_grad_norm
from tests.data_parallel import toy
from tests.data_parallel.toy import Sharded
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.optim.narrow import BF16, PRESETS

NUMEL = 2**23
BUCKET = 2**21
BUCKET_BYTES = BUCKET * (2 + 4)
"""Of one bucket's bf16 weights and fp32 gradients."""


class Peak(TorchDispatchMode):
    """Adds up the storages that operations made and that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.ignored: set[int] = set()
        self.peak = 0

    def ignore(self, tensors: list[torch.Tensor]) -> None:
        self.ignored |= {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.ignored:
                    self.known[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.known = {at: kept for at, kept in self.known.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.known.values()))
        return result


def _peak(ctx: Context, zero: dict[str, Any], compiled: bool, hidden: bool) -> int:
    before = os.environ.get("CUDA_OPS")
    os.environ["CUDA_OPS"] = "auto" if compiled else "off"
    library_for.cache_clear()
    try:
        return _measured(zero, hidden=hidden)
    finally:
        os.environ.pop("CUDA_OPS")
        if before is not None:
            os.environ["CUDA_OPS"] = before
        library_for.cache_clear()


def _measured(zero: dict[str, Any], *, hidden: bool) -> int:
    model = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(NUMEL // 2**20)).to(BF16)
    wanted = lambda m: [optim.AdamW(m.parameters(), lr=1e-3)]  # noqa: E731
    driver = Sharded(model, wanted, toy.make_mesh(1), zero=zero, bucket_numel=BUCKET)
    for param in model.parameters():
        param.grad = torch.full(param.shape, 1e-3)
    peak = Peak()
    for bucket in driver.reducer.buckets:
        peak.ignore([bucket.weights, bucket.grads.flat])
    for shard in driver.zeros[0].shards:
        peak.ignore([v for v in vars(shard.flat).values() if isinstance(v, torch.Tensor)])
    with peak:
        clip_grad_norm(driver.zeros, driver.mesh, 1.0)
        if hidden:
            copies = [bucket.weights.float() for bucket in driver.reducer.buckets]
            assert len(copies) == NUMEL // BUCKET
        driver.optimizer.step()
    driver.close()
    return peak.peak


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_needs_less_than_one_bucket_beside_the_state(preset: str, compiled: bool) -> None:
    (peak,) = run_ranks(_peak, 1, PRESETS[preset], compiled, False)
    # Measured: 4.2 MB, and 6.3 MB where fp32 copies are compared; a bucket has 12.6 MB.
    assert peak < BUCKET_BYTES


def test_a_hidden_copy_would_be_seen() -> None:
    (peak,) = run_ranks(_peak, 1, PRESETS["default"], False, True)
    assert peak > NUMEL * 4
