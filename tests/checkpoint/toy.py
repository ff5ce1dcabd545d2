"""A hand-made model of named tensors, cut over any layout, and its optimizer's state."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from goose_strategy.checkpoint.manifest import LocalTensor
from goose_strategy.checkpoint.save import Contents, save_checkpoint
from goose_strategy.checkpoint.state import optimizer_objects, optimizer_tensors, weight_tensors
from goose_strategy.errors import CheckpointError
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.mesh.shard import ShardSpec

LAYERS = 4
BUFFER = "scale"
HEAD = "head.weight"
EMBED = "embed.weight"
CPU = torch.device("cpu")

# Shape and cut dimension of each parameter; 10 rows are not divisible by 4.
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {EMBED: ((10, 6), 0)}
for _layer in range(LAYERS):
    SHAPES |= {
        f"layers.{_layer}.column.weight": ((8, 6), 0),
        f"layers.{_layer}.row.weight": ((6, 8), 1),
        f"layers.{_layer}.norm.weight": ((6,), None),
        f"layers.{_layer}.cube": ((3, 4, 5), None),
        f"layers.{_layer}.gain": ((), None),
    }


def whole(name: str, *, tag: str = "weight", dtype: torch.dtype = torch.float32) -> Tensor:
    """The whole tensor of a name: different for every name, tag and element."""
    shape = SHAPES[name][0] if name in SHAPES else (5,)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {tag}".encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def make_mesh(tp: int, pp: int, dp: int) -> ParallelMesh:
    layout = MeshLayout(tp=tp, pp=pp, dp=dp)
    return ParallelMesh.create(layout, device=CPU, timeout=timedelta(seconds=30))


def stage_of(name: str, pp: int) -> int:
    return 0 if name == EMBED else int(name.split(".")[1]) * pp // LAYERS


def spec_of(name: str, mesh: ParallelMesh) -> ShardSpec:
    shape, dim = SHAPES[name]
    offsets, lengths = [0] * len(shape), list(shape)
    if dim is not None:
        size, extra = divmod(shape[dim], mesh.tp_size)
        lengths[dim] = size + (mesh.tp_rank < extra)
        offsets[dim] = size * mesh.tp_rank + min(mesh.tp_rank, extra)
    return ShardSpec(
        name=name,
        global_shape=shape,
        offsets=tuple(offsets),
        local_shape=tuple(lengths),
        dtype=torch.float32,
        tp_dim=dim,
    )


def local(spec: ShardSpec, tensor: Tensor) -> Tensor:
    view = tensor
    for dim, (at, length) in enumerate(zip(spec.offsets, spec.local_shape, strict=True)):
        view = view.narrow(dim, at, length)
    return view.clone()


@dataclass
class Toy:
    """This rank's part of the model and of its optimizer."""

    mesh: ParallelMesh
    specs: dict[str, ShardSpec]
    weights: dict[str, Tensor]
    state: dict[str, dict[str, Any]]
    ranges: dict[str, tuple[int, int]]

    @classmethod
    def build(cls, mesh: ParallelMesh, *, tag: str = "") -> Toy:
        names = [name for name in SHAPES if stage_of(name, mesh.pp_size) == mesh.pp_rank]
        specs = {name: spec_of(name, mesh) for name in names}
        if mesh.pp_size > 1 and mesh.is_last_stage:
            embed = spec_of(EMBED, mesh)
            parts = {"name": HEAD, "tie": EMBED, "tie_owner": False}
            specs[HEAD] = ShardSpec(**{**embed.__dict__, **parts})
        source = {name: EMBED if name == HEAD else name for name in specs}
        weights = {n: local(s, whole(source[n], tag=tag + "weight")) for n, s in specs.items()}
        # A buffer that every stage holds.
        weights[BUFFER] = whole(BUFFER, tag=tag)
        ranges = flat_ranges(specs, mesh)
        state = {
            name: {
                key: (
                    local(specs[name], whole(source[name], tag=tag + key)).view(-1)[start:stop],
                    start,
                    stop,
                )
                for key in ("exp_avg", "exp_avg_sq")
            }
            | {"step": torch.tensor(3.0)}
            for name, (start, stop) in ranges.items()
        }
        return cls(mesh, specs, weights, state, ranges)

    def weight_list(self) -> list[LocalTensor]:
        aliases = {EMBED: [HEAD]}
        return weight_tensors("model", self.weights, self.specs, mesh=self.mesh, aliases=aliases)

    def state_list(self) -> list[LocalTensor]:
        return optimizer_tensors("optimizer", self.state, self.specs, mesh=self.mesh)

    def contents(self, **meta: Any) -> Contents:
        groups = [{"lr": 0.5, "betas": (0.9, 0.95), "fused": None, "params": list(SHAPES)}]
        return Contents(
            tensors=self.weight_list() + self.state_list(),
            meta={"step": 3, **meta},
            objects=optimizer_objects("optimizer", groups),
            identity={"class": "Toy"},
        )

    def clear(self) -> None:
        for tensor in self.tensors():
            tensor.fill_(float("nan"))

    def tensors(self) -> list[Tensor]:
        ranges = [
            value for _, values in sorted(self.state.items()) for _, value in sorted(values.items())
        ]
        return [
            *self.weights.values(),
            *(value[0] if isinstance(value, tuple) else value for value in ranges),
        ]


def flat_ranges(specs: dict[str, ShardSpec], mesh: ParallelMesh) -> dict[str, tuple[int, int]]:
    """Divide all local parameters, end to end, evenly over dp."""
    total = sum(spec.numel for spec in specs.values())
    each = -(-total // mesh.dp_size)
    low, high = each * mesh.dp_rank, each * (mesh.dp_rank + 1)
    ranges, at = {}, 0
    for name, spec in specs.items():
        start, stop = max(low - at, 0), min(high - at, spec.numel)
        if start < stop:
            ranges[name] = (start, stop)
        at += spec.numel
    return ranges


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def save_toy(
    context: Any, sizes: tuple[int, int, int], path: Path, tag: str = "", **meta: Any
) -> None:
    """Save the toy under a layout (tp, pp, dp); runs in a rank."""
    mesh = make_mesh(*sizes)
    save_checkpoint(path, Toy.build(mesh, tag=tag).contents(**meta), mesh=mesh)
    mesh.close()


def attempt(step: Callable[[], Any]) -> str:
    """Return the text of the CheckpointError that ``step`` must raise."""
    try:
        step()
    except CheckpointError as err:
        return str(err)
    raise AssertionError("no CheckpointError was raised")
