"""Training with gradients that no layout changes, and what is left of it, put together by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from goose_strategy.optim.clip import clip_grad_norm
from goose_strategy.optim.native import CLOCK, NativeShard
from goose_strategy.optim.state import NamedState, named_optimizer_state
from tests.data_parallel import toy
from tests.data_parallel.toy import Sharded, Wanted, adamw
from tests.harness.worker import Context

BF16 = torch.bfloat16
PRESETS: dict[str, dict[str, Any]] = {
    "default": {"preset": "default"},
    "compact": {"preset": "compact"},
    "alone": {"main": "bf16", "exp_avg": "bf16", "exp_avg_sq": "bf16"},
    "fp32": {"preset": "fp32", "skip_nonfinite": True},
    "mixed": {"main": "bf16+8", "exp_avg": "8bit", "exp_avg_sq": "bf16"},
}

Whole = dict[str, dict[str, Tensor]]


def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """Return a gradient of many sizes that depends on the name and the step alone."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 1000 + step)
    values = torch.randn(shape, generator=generator)
    return values * torch.exp(torch.randn(shape, generator=generator)) * 1e-2


def assign(driver: Sharded, step: int, *, without: tuple[str, ...] = ()) -> None:
    """Give every parameter its gradient; one assigned by hand counts as summed already."""
    narrow = driver.reducer.config.grads == "bf16"
    for name, param in driver.model.named_parameters():
        if name.startswith(without) and without:
            continue
        grad = gradient(name, param.shape, step)
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        param.grad = grad.to(BF16 if narrow and param.dtype == BF16 else wide)


def train(driver: Sharded, steps: range, *, max_norm: float = 0.7) -> None:
    for step in steps:
        assign(driver, step)
        norm = clip_grad_norm(driver.zeros, driver.mesh, max_norm)
        driver.trace.norms.append(norm.item())
        for optimizer in driver.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def start(
    ctx: Context,
    zero: dict[str, Any],
    *,
    wanted: Wanted = adamw,
    bucket_numel: int = 6000,
    dtype: torch.dtype = BF16,
    branches: int = 2,
) -> Sharded:
    mesh = toy.make_mesh(ctx.world_size)
    model = toy.toy(dtype, branches=branches)
    return Sharded(model, wanted, mesh, zero=zero, bucket_numel=bucket_numel)


def natives(driver: Sharded) -> list[NativeShard]:
    shards = [shard for zero in driver.zeros for shard in zero.shards]
    assert all(isinstance(shard, NativeShard) for shard in shards)
    return shards  # type: ignore[return-value]


def named(driver: Sharded) -> NamedState:
    """Return a copy of this rank's part of the states of all optimizers."""
    found: NamedState = {}
    for zero in driver.zeros:
        for name, entries in named_optimizer_state(zero).items():
            found[name] = {
                key: (value[0].clone(), value[1], value[2]) if isinstance(value, tuple) else value
                for key, value in entries.items()
            }
    return found


def whole(parts: list[NamedState]) -> Whole:
    """Put the parts of all ranks together."""
    shapes = {name: p.shape for name, p in toy.toy().named_parameters()}
    found: Whole = {}
    for part in parts:
        for name, entries in part.items():
            for key, value in entries.items():
                if not isinstance(value, tuple):
                    kept = found.setdefault(name, {}).setdefault(key, torch.as_tensor(value))
                    assert torch.equal(kept, torch.as_tensor(value))
                    continue
                values, first, last = value
                blank = torch.full((shapes[name].numel(),), torch.nan, dtype=values.dtype)
                flat = found.setdefault(name, {}).setdefault(key, blank)
                flat[first:last] = values
    return found


def sliced(state: Whole, ranges: dict[str, tuple[int, int]]) -> NamedState:
    """Cut whole states down to what a rank steps."""
    return {
        name: {
            key: (value[first:last], first, last) if value.dim() else value
            for key, value in state[name].items()
        }
        for name, (first, last) in ranges.items()
        if name in state
    }


def assert_equal(mine: Whole, theirs: Whole) -> None:
    """Assert that two states are bitwise equal, the count of steps apart."""
    assert mine.keys() == theirs.keys()
    for name, entries in theirs.items():
        assert mine[name].keys() - {CLOCK} == entries.keys() - {CLOCK}, name
        for key, value in entries.items():
            if key != CLOCK:
                assert torch.equal(mine[name][key], value), (name, key)
