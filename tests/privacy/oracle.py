"""Private calls on a mesh of ranks, and the same by Opacus in one process.

Opacus's vanilla ``GradSampleModule`` keeps every gradient of every sample; norms and clipped sums
follow from these by definition. Families that it refuses are called once per row.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from goose_strategy.privacy.config import FLOOR, PrivacyConfig
from goose_strategy.privacy.ledger import Ledger
from goose_strategy.runtime.core import ParallelRuntime
from goose_strategy.runtime.settings import RuntimeConfig
from tests.harness.compare import relative_error
from tests.harness.models import IGNORED, Batch, rows_of
from tests.harness.worker import Context
from tests.harness.world import run_ranks
from tests.parity.grid import DEADLINE, Plant, assemble
from tests.parity.lora import LoraCase
from tests.parity.session import OPTIMIZERS, Pieces

INF = float("inf")
# Opacus has no rule for scaled embeddings, and its hooks allow no sum in place.
BY_ROWS = ("falcon", "gemma")
# With the models of the harness, and fp64: nothing, about 40 % and all of the samples are clipped.
NONE_CLIPPED, SOME_CLIPPED, ALL_CLIPPED = 1e3, 8.0, 1e-2


@dataclass(frozen=True)
class PrivateCase(LoraCase):
    """One cell of the private grid; without ``targets`` the model has no adapters.

    Attributes:
        privacy: The settings.
        vanilla: Further arguments of the reference, for what it cannot know by itself.
    """

    targets: tuple[str, ...] = ()
    privacy: PrivacyConfig = field(
        default=PrivacyConfig(
            max_grad_norm=SOME_CLIPPED,
            noise_multiplier=0.0,
            logical_batch_size=1,
            sampling="none",
        )
    )

    def model(self) -> nn.Module:
        """Build the model, with adapters if any layer has some."""
        return super().model() if self.targets else super(LoraCase, self).model()

    def config(self) -> RuntimeConfig:
        """Return the settings of the mesh."""
        return replace(super().config(), privacy=self.privacy)

    def clipped_at(self, limit: float, **settings: Any) -> PrivateCase:
        """Return the case with another norm."""
        privacy = replace(self.privacy, max_grad_norm=limit, **settings)
        return replace(self, privacy=privacy)


@dataclass
class Seen:
    """What one rank saw of a call.

    Attributes:
        place: Its pp, dp and tp ranks.
        loss: The loss that the call returned.
        norms: Of the samples of its replica, in the order of the microbatches.
        sums: Its part of the clipped sums, before noise.
        noised: Its part of what the optimizer stepped on.
        parameters: Its part of the parameters after the step.
    """

    place: tuple[int, int, int]
    loss: float
    norms: Tensor
    sums: Pieces
    noised: Pieces = field(default_factory=dict)
    parameters: Pieces = field(default_factory=dict)


@dataclass
class Clipped:
    """A call put together.

    Attributes:
        loss: Mean over samples.
        norms: ``[samples]``.
        sums: Clipped sums by name.
        noised: What the optimizer stepped on, by name.
        parameters: After the step.
    """

    loss: float
    norms: Tensor
    sums: dict[str, Tensor]
    noised: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def start(case: PrivateCase) -> tuple[ParallelRuntime, Any, torch.optim.Optimizer]:
    """Start a case's mesh and shard its model; inside a world."""
    runtime = ParallelRuntime(case.config())
    runtime.start(torch.device("cpu"), timeout=DEADLINE)
    try:
        model = case.model()
        optimizer = OPTIMIZERS[case.optimizer]([p for p in model.parameters() if p.requires_grad])
        handle = runtime.shard_module(model, optimizers=[optimizer])
    except BaseException:
        runtime.stop()
        raise
    return runtime, handle, optimizer


def ledger_of(runtime: ParallelRuntime) -> Ledger:
    """Return the privacy of a run that has some."""
    assert runtime.ledger is not None
    return runtime.ledger


def pieces(handle: Any, tensors: dict[str, Tensor]) -> Pieces:
    """Pair tensors with the boxes of the whole model that they fill."""
    specs = handle.surgery.specs
    return {name: (specs[name], tensor.detach().clone()) for name, tensor in tensors.items()}


def private_call(ctx: Context, case: PrivateCase, batch: Batch, plant: Plant | None = None) -> Seen:
    """Run one private call and one step on this rank."""
    runtime = None
    try:
        runtime, handle, optimizer = start(case)
        mesh = runtime.mesh
        with nullcontext() if plant is None else plant(mesh):
            mine = rows_of(batch, mesh.dp_rank, mesh.dp_size)
            context = torch.autocast("cpu", case.autocast) if case.autocast else nullcontext()
            with context:
                loss = handle.module(**mine).loss
            with runtime.backward(loss):
                loss.backward()
            norms = torch.cat(ledger_of(runtime).stats.norms).double()
            sums = pieces(handle, handle.reducer.full_gradients())
            optimizer.step()
            noised = pieces(handle, handle.reducer.full_gradients())
            parameters = pieces(handle, dict(handle.module.named_parameters()))
        return Seen(tuple(mesh.coordinates), loss.item(), norms, sums, noised, parameters)
    finally:
        if runtime is not None:
            runtime.stop()


def run_call(
    case: PrivateCase, batch: Batch, plant: Plant | None = None, *, by_stage: bool = False
) -> Clipped:
    """Run one private call on the case's mesh, and put it together.

    Args:
        case: The case.
        batch: The global batch.
        plant: An error to plant.
        by_stage: Whether the ranks of a replica have norms of their own.
    """
    ranks: list[Seen] = run_ranks(private_call, case.world_size, case, batch, plant)
    by_replica: dict[int, Tensor] = {}
    for rank, seen in enumerate(ranks):
        replica = rank // case.tp % case.dp
        known = by_replica.setdefault(replica, seen.norms)
        same = by_stage or torch.equal(known.nan_to_num(), seen.norms.nan_to_num())
        assert same, f"rank {rank} has other norms than its replica"
        assert seen.loss == ranks[0].loss, f"rank {rank} has another loss"
    return Clipped(
        ranks[0].loss,
        torch.cat([by_replica[replica] for replica in sorted(by_replica)]),
        assemble([seen.sums for seen in ranks], "clipped sums"),
        assemble([seen.noised for seen in ranks], "noised sums"),
        assemble([seen.parameters for seen in ranks], "parameters"),
    )


def per_sample_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return each row's mean cross entropy over its own valid tokens, ``[rows]``."""
    targets = labels[:, 1:]
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    losses = cross_entropy(flat, targets.reshape(-1), ignore_index=IGNORED, reduction="none")
    valid = (targets != IGNORED).sum(1).clamp(min=1)
    return losses.view(targets.shape).sum(1) / valid


def _row_by_row(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return losses and gradients per sample of calls with one row each."""
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    losses, rows = [], []
    for row in range(batch["labels"].shape[0]):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        labels = alone.pop("labels")
        (loss,) = per_sample_losses(model(**alone, use_cache=False).logits, labels)
        losses.append(loss.detach())
        rows.append(torch.autograd.grad(loss, list(named.values())))
    stacked = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    return torch.stack(losses), dict(zip(named, stacked, strict=True))


@cache
def _gradients(case: PrivateCase, key: int) -> tuple[Tensor, dict[str, Tensor]]:
    batch = _BATCHES[key]
    model = case.model()
    if case.family in BY_ROWS:
        return _row_by_row(model, batch)
    from opacus.grad_sample import GradSampleModule

    with warnings.catch_warnings():
        # torch's, of the hooks of Opacus.
        warnings.simplefilter("ignore")
        private = GradSampleModule(model, loss_reduction="sum")
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        if case.family == "gpt2":
            ids = inputs["input_ids"]
            inputs["position_ids"] = torch.arange(ids.shape[1]).expand_as(ids)
        logits = private(**inputs, use_cache=False).logits
        losses = per_sample_losses(logits, batch["labels"])
        losses.sum().backward()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return losses.detach(), {name: param.grad_sample.detach() for name, param in named.items()}


_BATCHES: dict[int, Batch] = {}


def vanilla_gradients(case: PrivateCase, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return Opacus's losses ``[rows]`` and gradients per sample ``[rows, ...]`` by name."""
    _BATCHES[id(batch)] = batch
    plain = {"privacy": PrivateCase().privacy, "schedule": "1F1B", "pipeline": (), "tensor": ()}
    alone = replace(case, tp=4 if case.tp == 4 else 1, pp=1, dp=1, microbatches=1, **plain)
    return _gradients(alone, id(batch))


def reference_call(case: PrivateCase, batch: Batch) -> Clipped:
    """Return what a private call is by definition."""
    losses, gradients = vanilla_gradients(case, batch)
    gradients = {name: gradient.detach() for name, gradient in gradients.items()}
    squares = [torch.flatten(g, 1).square().sum(1) for g in gradients.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    factors = (case.privacy.max_grad_norm / (norms + FLOOR)).clamp(max=1.0)
    sums = {n: torch.einsum("i,i...->...", factors, g) for n, g in gradients.items()}
    return Clipped(losses.mean().item(), norms, sums)


def assert_same(mine: Clipped, theirs: Clipped, rel: float) -> None:
    """Compare losses, norms and clipped sums.

    Raises:
        AssertionError: Saying what differs.
    """
    error = abs(mine.loss - theirs.loss) / abs(theirs.loss)
    assert error <= rel, f"loss is {error:.2e} off"
    error = float(((mine.norms - theirs.norms).abs() / theirs.norms).max())
    assert error <= rel, f"norms are {error:.2e} off"
    assert mine.sums.keys() == theirs.sums.keys(), mine.sums.keys() ^ theirs.sums.keys()
    largest = max(float(value.norm()) for value in theirs.sums.values())
    for name, value in theirs.sums.items():
        if name.endswith("k_proj.bias") and float(value.norm()) < 1e-10 * largest:
            continue
        error = relative_error(mine.sums[name], value)
        assert error <= rel, f"clipped sum of {name} is {error:.2e} off"
