"""The verbs of a training loop, on one rank of a mesh and in one process.

A scenario is written once, as a function of a session, and run in both; what either records is
then compared. The one process uses torch alone: the model's logits, ``cross_entropy``, plain
autograd, ``clip_grad_norm_``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.runtime.core import ParallelRuntime
from tests.harness.compare import adamw, named_gradients
from tests.harness.models import IGNORED, Batch, rows_of

Pieces = dict[str, tuple[ShardSpec, Tensor]]
INF = float("inf")

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": adamw,
    # Smooth in the gradients: AdamW's first steps turn their smallest differences into signs.
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "grouped": lambda params: torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 5e-4},
        ],
        lr=1e-3,
    ),
    # Steps smaller than the spacing of bf16 weights.
    "slow": lambda params: torch.optim.AdamW(params, lr=2e-4),
}


@dataclass
class Record:
    """What a session saw.

    Attributes:
        losses: Of every call with labels.
        norms: Of every step, before clipping.
        gradients: Of every step by name, before clipping; on a mesh with the box they fill.
        logits: As many as the scenario kept.
        parameters: After the scenario, as the gradients.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Any]] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)


class Session:
    """What both kinds share.

    Attributes:
        model: The model; on a mesh it is sharded already.
        optimizer: Over its trainable parameters.
        autocast: Type of mixed precision, or ``None``.
        record: What was seen so far.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(self, autocast: torch.dtype | None) -> None:
        self.autocast = autocast
        self.record = Record()

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context of a forward."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast("cpu", self.autocast)

    def loss(self, batch: Batch | Sequence[Batch], **settings: Any) -> Tensor:
        """Call the model on a global batch (or a list of microbatches) and record its loss."""
        loss, _ = self.call(batch, **settings)
        self.record.losses.append(loss.item())
        return loss

    def keep_logits(self, logits: Tensor | Sequence[Tensor]) -> None:
        """Record logits (one tensor per microbatch where their lengths differ)."""
        every = [logits] if isinstance(logits, Tensor) else logits
        self.record.logits += [one.detach().clone() for one in every]

    def call(self, batch: Batch | Sequence[Batch], **settings: Any) -> tuple[Any, Any]:
        """Call the model on a global batch; return its loss and its logits of this rank's rows."""
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        """Run the backward of a loss."""
        raise NotImplementedError

    def accumulating(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Surround calls whose gradients are not summed over the replicas yet."""
        return nullcontext()

    def step(self, max_norm: float = INF) -> None:
        """Record gradients and their norm, clip, step, and clear the gradients."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.model.zero_grad()


class MeshSession(Session):
    """A session on one rank of a mesh.

    Args:
        runtime: Started.
        model: The whole model.
        optimizer: A key of ``OPTIMIZERS``.
        autocast: Type of mixed precision, or ``None``.
    """

    def __init__(
        self,
        runtime: ParallelRuntime,
        model: nn.Module,
        *,
        optimizer: str,
        autocast: torch.dtype | None,
    ) -> None:
        super().__init__(autocast)
        self.runtime = runtime
        self.mesh = runtime.mesh
        self.model = model
        self.optimizer = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
        self.handle = runtime.shard_module(model, optimizers=[self.optimizer])

    def rows(self, batch: Batch) -> Batch:
        """Return this replica's rows; a tensor with one row is everybody's."""
        shared = {name: value for name, value in batch.items() if value.shape[0] == 1}
        own = {name: value for name, value in batch.items() if name not in shared}
        return {**rows_of(own, self.mesh.dp_rank, self.mesh.dp_size), **shared}

    def call(self, batch: Batch | Sequence[Batch], **settings: Any) -> tuple[Any, Any]:
        with self.precision():
            if isinstance(batch, dict):
                output = self.model(**self.rows(batch), **settings)
            else:
                output = self.model([self.rows(one) for one in batch], **settings)
        return output.loss, output.logits

    def backward(self, loss: Tensor) -> None:
        with self.runtime.backward(loss):
            loss.backward()

    @contextmanager
    def accumulating(self, enabled: bool = True) -> Generator[None, None, None]:
        with self.runtime.no_sync(self.model, enabled=enabled):
            yield

    def step(self, max_norm: float = INF) -> None:
        assert self.handle.reducer is not None
        self.record.gradients.append(self.pieces(self.handle.reducer.full_gradients()))
        self.record.norms.append(self.runtime.clip_grad_norm(self.optimizer, max_norm).item())
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def pieces(self, tensors: dict[str, Tensor]) -> Pieces:
        """Pair tensors with the boxes of the whole model that they fill."""
        specs = self.handle.surgery.specs
        return {name: (specs[name], tensor.clone()) for name, tensor in tensors.items()}

    def finish(self) -> Record:
        """Record the parameters; return all that was recorded."""
        self.runtime.synchronize_parameters()
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        self.record.parameters = self.pieces(parameters)
        return self.record


class OneProcess(Session):
    """A session in this process.

    Args:
        model: The model, in the precision of the run.
        optimizer: A key of ``OPTIMIZERS``.
        autocast: Type of mixed precision, or ``None``.
        main: Precision of the weights that the optimizer steps; those of the model are rounded
            from them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: str,
        main: torch.dtype,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(autocast)
        self.model = model
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.main = [nn.Parameter(p.detach().to(main, copy=True)) for p in self.weights]
        self.optimizer = OPTIMIZERS[optimizer](self.main)

    def call(self, batch: Batch | Sequence[Batch], **settings: Any) -> tuple[Any, Any]:
        every = [batch] if isinstance(batch, dict) else batch
        with self.precision():
            logits = [self._logits(one, **settings) for one in every]
        whole = logits[0] if isinstance(batch, dict) else logits
        if any("labels" not in one for one in every):
            return None, whole
        sums = [token_sum(mine, one["labels"]) for mine, one in zip(logits, every, strict=True)]
        return sum(total for total, _ in sums) / max(1, sum(count for _, count in sums)), whole

    def _logits(self, batch: Batch, **settings: Any) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits: Tensor = self.model(**inputs, **settings).logits
        return logits

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, max_norm: float = INF) -> None:
        self.record.gradients.append(named_gradients(self.model))
        for main, weight in zip(self.main, self.weights, strict=True):
            main.grad = None if weight.grad is None else weight.grad.to(main.dtype)
        self.record.norms.append(nn.utils.clip_grad_norm_(self.main, max_norm).item())
        self.optimizer.step()
        with torch.no_grad():
            for main, weight in zip(self.main, self.weights, strict=True):
                weight.copy_(main)
        self.zero_grad()

    def finish(self) -> Record:
        """Record the parameters; return all that was recorded."""
        named = self.model.named_parameters()
        self.record.parameters = {name: p.detach().clone() for name, p in named}
        return self.record


def token_sum(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the cross entropy over valid tokens, and their number.

    Args:
        logits: ``[batch, seq, vocab]``; the sum is in fp32, for fp64 logits in fp64.
        labels: ``[batch, seq]``, not shifted; -100 is ignored.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = labels[:, 1:].reshape(-1)
    flat = wide[:, :-1].reshape(-1, wide.shape[-1])
    total = cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    return total, int((targets != IGNORED).sum())
