"""What every test of this room needs: a tp-only mesh, one step, and whole tensors out of slices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from goose_strategy.compat.transformers import install_loss, output_embedding
from goose_strategy.mesh.layout import MeshLayout
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.mesh.shard import ShardSpec
from goose_strategy.models.registry import plan_for
from goose_strategy.tensor_parallel.config import TensorConfig
from goose_strategy.tensor_parallel.head import causal_lm_loss
from goose_strategy.tensor_parallel.parallelize import parallelize
from tests.harness.compare import Reference, reference_run
from tests.harness.models import IGNORED, Batch, batches, tiny_model
from tests.harness.worker import Context

_R = TypeVar("_R")


class Step(NamedTuple):
    """What one rank saw in one step."""

    loss: float
    gradients: dict[str, tuple[ShardSpec, Tensor]]


def with_mesh(fn: Callable[..., _R]) -> Callable[..., _R]:
    """Call ``fn(ctx, mesh, ...)`` with a mesh of tensor parallelism only over the world."""

    @functools.wraps(fn)
    def on_rank(ctx: Context, *args: Any) -> _R:
        layout = MeshLayout.from_world(ctx.world_size, tp=ctx.world_size, pp=1)
        cpu, timeout = torch.device("cpu"), timedelta(seconds=30)
        mesh = ParallelMesh.create(layout, device=cpu, timeout=timeout)
        try:
            return fn(ctx, mesh, *args)
        finally:
            mesh.close()

    return on_rank


def cut(
    model: nn.Module, mesh: ParallelMesh, config: TensorConfig | None = None
) -> dict[str, ShardSpec]:
    """Cut ``model`` and install the loss that fits."""
    specs = parallelize(model, plan_for(model, config), mesh)
    head = output_embedding(model)
    gather = config is not None and config.gather_logits
    install_loss(model, causal_lm_loss(head and head[1], gather_logits=gather))
    return specs


def one_step(model: nn.Module, specs: Mapping[str, ShardSpec], batch: Batch) -> Step:
    """Forward with labels, backward, and every gradient with its spec."""
    output = model(**batch)
    output.loss.backward()
    gradients = {
        name: (specs[name], param.grad.clone())
        for name, param in model.named_parameters()
        if param.grad is not None
    }
    return Step(output.loss.item(), gradients)


def whole(parts: Sequence[Mapping[str, tuple[ShardSpec, Tensor]]]) -> dict[str, Tensor]:
    """Put the tensors of all tp ranks together, as their specs say."""
    names = parts[0].keys()
    assert all(part.keys() == names for part in parts)
    return {name: _whole([part[name] for part in parts]) for name in names}


def _whole(parts: Sequence[tuple[ShardSpec, Tensor]]) -> Tensor:
    spec, first = parts[0]
    if spec.tp_partial:
        return torch.stack([tensor for _, tensor in parts]).sum(0)
    if not spec.is_sharded:
        assert all(torch.equal(first, tensor) for _, tensor in parts), f"{spec.name} differs"
        return first
    result = first.new_full(spec.global_shape, torch.nan)
    for mine, tensor in parts:
        assert tuple(tensor.shape) == mine.local_shape
        for box, piece in mine.pieces(tensor):
            place = tuple(slice(a, a + n) for a, n in zip(*box, strict=True))
            assert result[place].isnan().all(), f"{spec.name}: two ranks hold the same elements"
            result[place] = piece
    assert not result.isnan().any(), f"{spec.name}: no rank holds some elements"
    return result


def reference(
    family: str,
    *,
    prepare: Callable[[nn.Module], None] | None = None,
    batch: Batch | None = None,
    **settings: object,
) -> Reference:
    """One step of one process on the same model and batch."""
    model = tiny_model(family, **settings)  # type: ignore[arg-type]
    if prepare is not None:
        prepare(model)
    return reference_run(model, [batch or awkward_batch(settings.get("vocab", 97))])


def awkward_batch(vocab: object = 97) -> Batch:
    """Right padding, uneven numbers of ignored labels."""
    (batch,) = batches(1, vocab=int(str(vocab)))
    assert (batch["labels"] != IGNORED).sum(1).unique().numel() > 1
    return batch
