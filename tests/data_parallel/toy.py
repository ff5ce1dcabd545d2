"""A toy model, and drivers that run one and the same training loop plainly, under ddp, or with us.

A scenario is a function of a driver. The reference is the scenario under `Plain`, which sees the
whole batch; each rank runs it under `Sharded`, which sees its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from goose_strategy.data_parallel.config import ZeroConfig
from goose_strategy.data_parallel.reducer import Reducer
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.optim.clip import clip_grad_norm
from goose_strategy.optim.zero import ZeroShards

WIDTH = 12
ROWS = 16
STEPS = 5
CPU = torch.device("cpu")

OptimizerOf = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Wanted = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]


class Toy(nn.Module):
    """Enough odd sizes that parameters cross the slices of four ranks and several buckets."""

    def __init__(self, *, branches: int = 2) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 150)
        self.norm = nn.LayerNorm(150)
        self.outer = nn.Linear(150, 61)
        self.branch = nn.ModuleList(nn.Linear(61, 7) for _ in range(branches))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        hidden = torch.tanh(self.outer(torch.tanh(self.norm(self.inner(x)))))
        return self.branch[branch](hidden) * self.gain


def toy(dtype: torch.dtype = torch.float64, *, branches: int = 2) -> Toy:
    torch.manual_seed(3)
    model = Toy(branches=branches)
    nn.init.normal_(model.norm.bias, std=0.1)
    return model.to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not: the usual two groups."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(decay_groups(model), lr=1e-2)]


def make_mesh(world_size: int, *, tp: int = 1, pp: int = 1) -> ParallelMesh:
    layout = MeshLayout.from_world(world_size, tp=tp, pp=pp)
    return ParallelMesh.create(layout, device=CPU, timeout=timedelta(seconds=30))


@dataclass
class Trace:
    """What a scenario leaves behind."""

    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


class Plain:
    """One process, the whole batch, torch as it is."""

    def __init__(self, model: nn.Module, wanted: Wanted) -> None:
        self.model = model
        self.optimizers = list(wanted(model))
        self.trace = Trace()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model(*args, **kwargs)

    def rows(self, x: Tensor) -> Tensor:
        return x

    def backward(self, loss: Tensor, *, sync: bool = True, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def call(self, losses: Callable[[], Iterable[Tensor]], *, sync: bool = True) -> Any:
        """Run the backwards of a pipelined call; `release` decides what becomes of them."""
        kept = [p.grad for p in self.model.parameters()]
        for p in self.model.parameters():
            p.grad = None
        for loss in losses():
            loss.backward()
        grads = [p.grad for p in self.model.parameters()]
        for p, grad in zip(self.model.parameters(), kept, strict=True):
            p.grad = grad
        return grads

    def release(self, call: Any, factor: float = 1.0) -> None:
        for p, grad in zip(self.model.parameters(), call, strict=True):
            if grad is not None:
                p.grad = grad * factor if p.grad is None else p.grad + grad * factor

    def end_backward(self) -> None:
        """What the strategy does after the user's backward of a call."""

    def clip(self, max_norm: float, norm_type: float = 2.0, index: int = 0) -> float:
        params = [p for g in self.optimizers[index].param_groups for p in g["params"]]
        norm = nn.utils.clip_grad_norm_(params, max_norm, norm_type).item()
        self.trace.norms.append(norm)
        return norm

    def record_gradients(self) -> None:
        self.trace.gradients.append(
            {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        )

    def finish(self) -> Trace:
        named = self.model.named_parameters()
        self.trace.parameters = {name: p.detach().clone() for name, p in named}
        return self.trace


class Sharded(Plain):
    """One rank with a reducer and sharded optimizers."""

    def __init__(
        self,
        model: nn.Module,
        wanted: Wanted,
        mesh: ParallelMesh,
        *,
        specs: dict[str, ShardSpec] | None = None,
        told: bool = True,
        bucket_numel: int = 6000,
        overlap: bool = True,
        zero: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(model, wanted)
        self.mesh = mesh
        names = {id(p): n for n, p in model.named_parameters()}
        owners = {
            names[id(p)]: (i, g)
            for i, optimizer in enumerate(self.optimizers)
            for g, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self.reducer = Reducer(
            list(model.named_parameters()),
            specs or {},
            mesh,
            config=ZeroConfig(bucket_numel=bucket_numel, overlap_reduce=overlap, **(zero or {})),
            average=True,
            owner_of=owners if told else {},
        )
        self.zeros = [ZeroShards(self.reducer, optimizer) for optimizer in self.optimizers]

    def rows(self, x: Tensor) -> Tensor:
        return x.chunk(self.mesh.dp_size)[self.mesh.dp_rank]

    def backward(self, loss: Tensor, *, sync: bool = True, **kwargs: Any) -> None:
        self.reducer.sync = sync
        loss.backward(**kwargs)
        self.reducer.finish_backward()
        self.reducer.sync = True

    def call(self, losses: Callable[[], Iterable[Tensor]], *, sync: bool = True) -> Any:
        call = self.reducer.begin_call(sync)
        pending: Tensor | None = None
        for loss in losses():
            if pending is not None:
                pending.backward()
            pending = loss
        assert pending is not None
        with self.reducer.completing(0):
            pending.backward()
        return self.reducer.end_call(call)

    def release(self, call: Any, factor: float = 1.0) -> None:
        self.reducer.release(call, factor)

    def clip(self, max_norm: float, norm_type: float = 2.0, index: int = 0) -> float:
        zero = self.zeros[index]
        norm = clip_grad_norm([zero], self.mesh, max_norm, norm_type=norm_type).item()
        self.trace.norms.append(norm)
        return norm

    def record_gradients(self) -> None:
        self.trace.gradients.append(self.reducer.full_gradients())

    def finish(self) -> Trace:
        trace = super().finish()
        self.close()
        return trace

    def close(self) -> None:
        self.reducer.close()
        self.mesh.close()


class Replicated(Plain):
    """One rank under ``DistributedDataParallel`` with an ordinary optimizer."""

    def __init__(self, model: nn.Module, wanted: Wanted, mesh: ParallelMesh) -> None:
        super().__init__(model, wanted)
        self.mesh = mesh
        self.wrapped = DistributedDataParallel(
            model, process_group=mesh.dp, find_unused_parameters=True
        )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.wrapped(*args, **kwargs)

    def rows(self, x: Tensor) -> Tensor:
        return x.chunk(self.mesh.dp_size)[self.mesh.dp_rank]

    def backward(self, loss: Tensor, *, sync: bool = True, **kwargs: Any) -> None:
        with nullcontext() if sync else self.wrapped.no_sync():
            loss.backward(**kwargs)


def largest_gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest ``‖a - b‖ / ‖b‖`` over tensors of the same names."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    gaps = []
    for name, expected in other.items():
        expected = expected.double()
        assert expected.norm() > 0, name
        gaps.append(((one[name].double() - expected).norm() / expected.norm()).item())
    return max(gaps)


def assert_same(trace: Trace, reference: Trace, *, rel: float) -> None:
    """Assert that parameters, recorded gradients and norms agree within ``rel``."""
    assert largest_gap(trace.parameters, reference.parameters) <= rel
    assert len(trace.gradients) == len(reference.gradients)
    for mine, theirs in zip(trace.gradients, reference.gradients, strict=True):
        assert largest_gap(mine, theirs) <= rel
    assert len(trace.norms) == len(reference.norms)
    for mine, theirs in zip(trace.norms, reference.norms, strict=True):
        assert abs(mine - theirs) <= rel * abs(theirs), (mine, theirs)
