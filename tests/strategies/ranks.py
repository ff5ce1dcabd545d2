"""Several scenarios in one world of isolated ranks: a world costs seconds, a scenario a fraction.

Every scenario starts its own Fabric or Trainer, so that nothing but the process is shared. What one
raises is its result, on every rank; the tests in the parent look at results only.
"""

from __future__ import annotations

import gc
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor, nn

from goose_strategy import Goose3DFabricStrategy, PipelineConfig
from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.runtime.model import ShardedModel
from tests.harness.worker import Context, seed_everything
from tests.harness.world import run_ranks

Scenario = Callable[[Context], Any]
Pieces = dict[str, tuple[ShardSpec, Tensor]]


@dataclass(frozen=True)
class Raised:
    """What a scenario raised, as text (an exception may not survive pickling)."""

    kind: str
    message: str
    trace: str


def attempt(act: Callable[[], Any]) -> Any:
    """Return what ``act`` returns, or what it raised."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the result
        return Raised(type(error).__name__, str(error), "".join(traceback.format_exc()))


def play(ctx: Context, scenarios: list[Scenario]) -> list[Any]:
    """Run scenarios one after another on this rank."""
    results: list[Any] = []
    for scenario in scenarios:
        seed_everything()
        results.append(attempt(partial(scenario, ctx)))
        gc.collect()
    return results


def world(size: int, *scenarios: Scenario, timeout_s: float = 50.0) -> dict[str, list[Any]]:
    """Run scenarios in one world.

    Args:
        size: Number of ranks.
        *scenarios: Top-level functions of a test module.
        timeout_s: For all of them.

    Returns:
        Results of all ranks, by the scenario's name.
    """
    ranks = run_ranks(play, size, list(scenarios), isolated=True, timeout_s=timeout_s)
    names = [scenario.__name__.strip("_") for scenario in scenarios]
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(names)}


def same_error(results: list[Any], kind: str, match: str) -> None:
    """Assert that every rank raised an error of a class whose message matches."""
    for rank, result in enumerate(results):
        assert isinstance(result, Raised), f"rank {rank} raised nothing but returned {result!r}"
        assert result.kind == kind, f"rank {rank}: {result.trace}"
        assert re.search(match, result.message, re.DOTALL), f"rank {rank}: {result.message}"


def good(results: list[Any]) -> list[Any]:
    """Return results, none of which may be an error."""
    for rank, result in enumerate(results):
        assert not isinstance(result, Raised), f"rank {rank}: {result.trace}"
    return results


def make_fabric(
    ctx: Context,
    tp: int = 1,
    pp: int = 1,
    *,
    microbatches: int | None = 2,
    precision: str = "64-true",
    **pipeline: Any,
) -> Fabric:
    """Start Fabric on this rank."""
    config = PipelineConfig(num_microbatches=microbatches, **pipeline)
    strategy = Goose3DFabricStrategy(tp=tp, pp=pp, pipeline=config)
    fabric = Fabric(
        accelerator="cpu", devices=ctx.world_size, strategy=strategy, precision=precision
    )
    fabric.launch()
    return fabric


def pieces(model: ShardedModel) -> Pieces:
    """Return this rank's parameters with the box that each fills of the whole tensor."""
    return {
        name: (model.surgery.specs[name], param.detach().clone())
        for name, param in model.module.named_parameters()
    }


@contextmanager
def advice_ignored() -> Iterator[None]:
    """Let Lightning advise, which it does on rank 0 only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module behind Fabric's wrapper."""
    inner: nn.Module = module.module
    return inner
