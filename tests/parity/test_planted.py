"""Errors planted on purpose: the comparison that should see each of them does.

A parity test that cannot fail proves nothing. Each plant is one error that a change could bring
back: the case passes without it, and with it fails in the number that the error spoils.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from goose_strategy.comm.collectives import DONE, Pending, all_gather_flat, all_reduce
from goose_strategy.data_parallel import bucket
from goose_strategy.mesh.mesh import ParallelMesh
from goose_strategy.optim import clip
from goose_strategy.pipeline_parallel.work import Work
from goose_strategy.runtime import optimizing, pipeline
from goose_strategy.runtime.counting import TokenCount
from goose_strategy.runtime.forward import _GlobalLoss
from goose_strategy.tensor_parallel import regions
from goose_strategy.tensor_parallel.linear import RowParallelLinear
from tests.parity.grid import Case, Plant, assert_parity

CUBE = Case(tp=2, pp=2, dp=2, steps=1)
BIASED = replace(CUBE, settings=(("attention_bias", True), ("mlp_bias", True)))


def tied_copy_not_summed(mesh: ParallelMesh) -> AbstractContextManager[object]:
    """Each stage steps its copy of a tied weight by its own gradient."""
    return patch.object(bucket, "all_reduce", _without(mesh.tie))


def partial_gradient_not_summed(mesh: ParallelMesh) -> AbstractContextManager[object]:
    """Each tp rank steps the q and k norms by the gradient of its own heads."""
    return patch.object(bucket, "all_reduce", _without(mesh.tp))


def _without(skipped: object) -> Any:
    def reduce(tensor: Tensor, group: Any, **settings: Any) -> Pending:
        return DONE if group is skipped else all_reduce(tensor, group, **settings)

    return reduce


def microbatch_dropped(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """The last microbatch is forgotten."""
    split = pipeline.split_batch
    return patch.object(pipeline, "split_batch", lambda *args, **kw: split(*args, **kw)[:-1])


def labels_of_another_microbatch(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """The outputs of one microbatch meet the labels of the next (DeepSpeed's issue 5729)."""
    split = pipeline.split_batch

    def rotated(*args: Any, **kw: Any) -> Any:
        parts = split(*args, **kw)
        labels = [part["labels"] for part in parts]
        return [part | {"labels": labels[i - 1]} for i, part in enumerate(parts)]

    return patch.object(pipeline, "split_batch", rotated)


def microbatch_without_backward(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """The loss counts every microbatch, but the gradients miss the first one."""
    backward = Work.backward

    def zero_seed(work: Work, place: Any, gradients: Any) -> Any:
        held = work._held[place]
        if held.seed and place[1] == 0:
            nothing = tuple(torch.zeros_like(one) for one in held.seed)
            work._held[place] = held._replace(seed=nothing)
        return backward(work, place, gradients)

    return patch.object(Work, "backward", zero_seed)


def norm_per_stage(mesh: ParallelMesh) -> AbstractContextManager[object]:
    """Each stage clips by the norm of its own gradients."""
    layout = mesh.layout
    others = [r for r in range(layout.world_size) if layout.coordinates(r).pp != mesh.pp_rank]

    def gather(output: Tensor, shard: Tensor, group: Any) -> Pending:
        all_gather_flat(output, shard, group).wait()
        output.view(layout.world_size, -1)[others, :-1] = 0
        return DONE

    return patch.object(clip, "all_gather_flat", gather)


def copies_counted_twice(mesh: ParallelMesh) -> AbstractContextManager[object]:
    """The norm counts what all tp ranks hold alike once per rank."""

    class FirstRank:
        tp_rank = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(mesh, name)

    def clip_grad_norm(sources: Any, _mesh: ParallelMesh, *args: Any, **kw: Any) -> Tensor:
        return clip.clip_grad_norm(sources, FirstRank(), *args, **kw)  # type: ignore[arg-type]

    return patch.object(optimizing, "clip_grad_norm", clip_grad_norm)


def loss_divided_by_the_world(mesh: ParallelMesh) -> AbstractContextManager[object]:
    """Tokens are counted on every rank instead of once per replica."""
    wait, copies = TokenCount.wait, mesh.tp_size * mesh.pp_size
    return patch.object(TokenCount, "wait", lambda count: wait(count) * copies)


@contextmanager
def gradients_averaged_over_replicas(mesh: ParallelMesh) -> Iterator[None]:
    """The loss is divided by all tokens, and its gradient by the number of replicas once more."""
    share = pipeline.PipelineCall._share

    def without_dp(*args: Any, **kw: Any) -> tuple[Tensor, Any]:
        loss, scale = share(*args, **kw)
        return loss, scale / mesh.dp_size

    direct = staticmethod(lambda _ctx, grad: (grad, None, None))
    with (
        patch.object(pipeline.PipelineCall, "_share", without_dp),
        patch.object(_GlobalLoss, "backward", direct),
    ):
        yield


def input_copy_without_sum(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """Column layers return the gradient of their own slice to what came before them."""
    return patch.object(regions, "_enter", lambda x, _group: x.view_as(x))


def row_bias_on_every_rank(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """Every rank adds the bias before the sum over tp."""

    def forward(layer: RowParallelLinear, x: Tensor) -> Tensor:
        return regions.leave_island(linear(x, layer.weight, layer.bias), layer.group)

    return patch.object(RowParallelLinear, "forward", forward)


def weights_not_gathered(_mesh: ParallelMesh) -> AbstractContextManager[object]:
    """After the step every rank keeps the old weights of the other replicas' slices."""
    return patch.object(bucket.Bucket, "gather_weights", lambda _bucket: DONE)


DIFFERENT = "gradients of step 0: two ranks hold different values of"
PLANTS: list[tuple[Plant, Case, str]] = [
    (tied_copy_not_summed, replace(CUBE, tied=True), rf"^{DIFFERENT} (lm_head|model\.embed)"),
    (tied_copy_not_summed, Case(pp=2, tied=True, steps=1), rf"^{DIFFERENT} (lm_head|model\.embed)"),
    (partial_gradient_not_summed, replace(CUBE, family="qwen3"), rf"^{DIFFERENT} .*[qk]_norm"),
    (partial_gradient_not_summed, Case("qwen3", tp=4, steps=1), rf"^{DIFFERENT} .*[qk]_norm"),
    (microbatch_dropped, CUBE, r"^losses: number 0"),
    (labels_of_another_microbatch, Case(pp=2, microbatches=2, steps=1), r"^losses: number 0"),
    (microbatch_without_backward, CUBE, r"^gradients of step 0: \d+ of \d+ tensors"),
    (microbatch_without_backward, Case(pp=2, steps=1), r"^gradients of step 0: \d+ of \d+ tensors"),
    (norm_per_stage, replace(CUBE, max_norm=0.5), r"^norms of rank 4 and of rank 0 differ"),
    (copies_counted_twice, replace(CUBE, max_norm=0.5), r"^norms: number 0"),
    (loss_divided_by_the_world, CUBE, r"^losses: number 0"),
    (loss_divided_by_the_world, Case(tp=2, steps=1), r"^losses: number 0"),
    (gradients_averaged_over_replicas, CUBE, r"^gradients of step 0: (\d+) of \1 tensors"),
    (gradients_averaged_over_replicas, Case(dp=2, steps=1), r"^gradients of step 0: (\d+) of \1 t"),
    (input_copy_without_sum, CUBE, rf"^{DIFFERENT} .*norm"),
    (row_bias_on_every_rank, BIASED, r"^losses: number 0"),
    (weights_not_gathered, CUBE, r"^(losses: number 1|losses of rank|.* two ranks hold)"),
]


@pytest.mark.parametrize(
    ("plant", "case", "reason"),
    [pytest.param(*entry, id=f"{entry[0].__name__}-{entry[1].mesh_name}") for entry in PLANTS],
)
def test_a_planted_error_is_caught(plant: Plant, case: Case, reason: str) -> None:
    assert_parity(case)
    with pytest.raises(AssertionError, match=reason):
        assert_parity(case, plant=plant)
