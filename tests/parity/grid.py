"""Train one case on a mesh of ranks and put the pieces together as one process would have them.

Every rank returns its gradients and parameters with the box of the whole tensor that each fills;
the parent assembles them, checks that copies of the same box are bitwise equal, and compares with
a run in one process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from goose_strategy.comm.collectives import all_gather_objects
from goose_strategy.comm.recorder import Recorder, recording
from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.optim.config import ZeroConfig
from goose_strategy.pipeline_parallel.config import PipelineConfig
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.compare import (
    Reference,
    adamw,
    assert_close_named,
    assert_close_numbers,
    reference_run,
)
from tests.harness.models import Batch, Family, batches, rows_of, tiny_model
from tests.harness.worker import Context
from tests.harness.world import run_ranks

DEADLINE = timedelta(seconds=40)


@dataclass(frozen=True)
class Case:
    """One cell of the grid.

    Attributes:
        family: Model family.
        tp: Tensor parallel size.
        pp: Stages.
        dp: Replicas.
        schedule: Pipeline schedule.
        microbatches: Per call.
        tied: Whether the head shares the embedding.
        accumulate: Calls per step.
        max_norm: Clip to this.
        frozen: Prefixes of frozen parameters.
        steps: Optimizer steps.
        dtype: Of the weights.
        autocast: Type of mixed precision, or ``None``.
        settings: Further arguments of the model's config.
    """

    family: Family = "llama"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    schedule: str = "1F1B"
    microbatches: int = 2
    tied: bool = False
    accumulate: int = 1
    max_norm: float | None = None
    frozen: tuple[str, ...] = ()
    steps: int = 5
    dtype: torch.dtype = torch.float64
    autocast: torch.dtype | None = None
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        sizes = [(n, getattr(self, n)) for n in ("tp", "pp", "dp") if getattr(self, n) > 1]
        words = [self.family, *(f"{name}{size}" for name, size in sizes)]
        words += [self.schedule] if self.pp > 1 else []
        words += ["tied"] if self.tied else []
        words += [f"accumulate{self.accumulate}"] if self.accumulate > 1 else []
        words += [f"clip{self.max_norm}"] if self.max_norm is not None else []
        words += ["frozen"] if self.frozen else []
        return "-".join(words)

    def model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Build the model, with what is frozen."""
        heads = 4
        model = tiny_model(
            self.family,
            tied=self.tied,
            dtype=dtype or self.dtype,
            heads=heads,
            kv_heads=4 if self.tp == 4 else 2,
            **dict(self.settings),
        )
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(self.frozen) if self.frozen else True)
        return model

    def batches(self) -> list[Batch]:
        """Return the global batches of all steps."""
        return batches(self.steps * self.accumulate, batch_size=max(4, 2 * self.dp))


@dataclass
class Run:
    """What a mesh of ranks computed, put together.

    Attributes:
        losses: Per call, of every rank.
        norms: Per step.
        gradients: Per step, whole tensors by name.
        parameters: After the last step, whole tensors by name.
    """

    losses: list[list[float]] = field(default_factory=list)
    norms: list[list[float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


Pieces = dict[str, tuple[ShardSpec, Tensor]]


def train_rank(ctx: Context, case: Case) -> dict[str, Any]:
    """Train the case on one rank; runs inside a world."""
    config = RuntimeConfig(
        tp=case.tp,
        pp=case.pp,
        pipeline=PipelineConfig(schedule=case.schedule, num_microbatches=case.microbatches),
        zero=ZeroConfig(bucket_numel=4096),
    )
    runtime = ParallelRuntime(config)
    runtime.start(torch.device("cpu"), timeout=DEADLINE)
    recorder = Recorder()
    try:
        with recording(recorder):
            out = _train(runtime, case)
    finally:
        runtime.stop()
    return out


def _train(runtime: ParallelRuntime, case: Case) -> dict[str, Any]:
    model = case.model()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    handle = runtime.shard_module(model, optimizers=[optimizer])
    mesh = runtime.mesh
    out: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    for index, batch in enumerate(case.batches(), start=1):
        mine = rows_of(batch, mesh.dp_rank, mesh.dp_size)
        last = index % case.accumulate == 0
        with runtime.no_sync(model, enabled=not last):
            with torch.autocast("cpu", case.autocast, enabled=case.autocast is not None):
                loss = model(**mine).loss
            scaled = loss / case.accumulate
            with runtime.backward(scaled):
                scaled.backward()
        out["losses"].append(loss.item())
        if not last:
            continue
        assert handle.reducer is not None
        out["gradients"].append(_pieces(handle.reducer.full_gradients(), handle.surgery.specs))
        limit = float("inf") if case.max_norm is None else case.max_norm
        out["norms"].append(runtime.clip_grad_norm(optimizer, limit).item())
        optimizer.step()
        optimizer.zero_grad()
    params = {name: p.detach() for name, p in model.named_parameters()}
    out["parameters"] = _pieces(params, handle.surgery.specs)
    return out


def _pieces(tensors: dict[str, Tensor], specs: dict[str, ShardSpec]) -> Pieces:
    return {name: (specs[name], tensor.clone()) for name, tensor in tensors.items()}


def run_case(case: Case) -> Run:
    """Train a case on its mesh."""
    ranks = run_ranks(train_rank, case.world_size, case)
    run = Run()
    run.losses = [rank["losses"] for rank in ranks]
    run.norms = [rank["norms"] for rank in ranks]
    steps = len(ranks[0]["gradients"])
    run.gradients = [assemble([rank["gradients"][s] for rank in ranks]) for s in range(steps)]
    run.parameters = assemble([rank["parameters"] for rank in ranks])
    return run


def assemble(ranks: list[Pieces]) -> dict[str, Tensor]:
    """Put the ranks' pieces together; copies of one box must be bitwise equal."""
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for pieces in ranks:
        for name, (spec, tensor) in pieces.items():
            target = spec.tie if spec.tie is not None else name
            if target not in whole:
                whole[target] = torch.zeros(spec.global_shape, dtype=tensor.dtype)
                filled[target] = torch.zeros(spec.global_shape, dtype=torch.bool)
            place = tuple(
                slice(at, at + length)
                for at, length in zip(spec.offsets, spec.local_shape, strict=True)
            )
            seen = filled[target][place]
            if seen.numel() and bool(seen.all()):
                equal = torch.equal(whole[target][place], tensor)
                assert equal, f"two ranks hold different values of {name}"
            whole[target][place] = tensor
            filled[target][place] = True
    for name, mask in filled.items():
        assert bool(mask.all()), f"{name} was not covered by the ranks"
    return whole


def reference_of(case: Case) -> Reference:
    """Train the case in one process."""
    one = replace(case, tp=1, pp=1, dp=1)
    if case.tp == 4:
        one = replace(one, settings=(*case.settings, ("num_key_value_heads", 4)))
    return reference_run(
        one.model(torch.float64),
        case.batches(),
        accumulate=case.accumulate,
        max_norm=case.max_norm,
        optimizer=partial(adamw),
    )


@dataclass(frozen=True)
class Bounds:
    """Largest relative differences that a case may have."""

    loss: float = 1e-10
    gradient: float = 1e-10
    parameter: float = 1e-9


def assert_parity(case: Case, bounds: Bounds = Bounds()) -> None:
    """Train a case on its mesh and in one process, and compare everything."""
    reference = reference_of(case)
    run = run_case(case)
    for losses in run.losses:
        assert_close_numbers(losses, reference.losses, bounds.loss)
    for norms in run.norms:
        assert_close_numbers(norms, reference.norms, bounds.loss)
    for mine, theirs in zip(run.gradients, reference.gradients, strict=True):
        assert_close_named(mine, theirs, bounds.gradient)
    assert_close_named(run.parameters, reference.parameters, bounds.parameter)


def gathered(value: object, group: Any) -> list[object]:
    """Return a value of every rank."""
    return all_gather_objects(value, group)
