"""A plan that nobody has proved is tried out on two layers of the model before it is used.

transformers' plans were written for inference, where a parameter whose gradient is a share of the
whole does no harm: its own Apertus trains wrongly for that. Here a clone of the model with two
layers and random parameters is cut as planned, and its logits and every gradient are compared with
those of an uncut copy. It costs what two layers and the embeddings cost, once.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.compat.transformers import small_clone
from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.parallelize import parallelize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.mesh.shard import ShardSpec
    from goose_strategy.tensor_parallel.plan import TensorPlan

LAYERS = 2
_TOLERANCE = 1e-3
"""Relative; rounding in fp32 is 1e-5 off, a missing share 1e-1."""
_NOTHING = 1e-4
"""Gradients below this part of the largest are rounding: a key's bias has none, for example."""


def verify_plan(model: nn.Module, plan: TensorPlan, mesh: ParallelMesh) -> None:
    """Compare a cut clone of ``model`` with an uncut one. Collective over the world.

    Args:
        model: The whole model, before it is cut; only its class and config are looked at.
        plan: How it will be cut.
        mesh: The mesh.

    Raises:
        PlanError: On all ranks, naming what differs most.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        whole = small_clone(model, LAYERS).eval()
        _randomise(whole)
        cut = copy.deepcopy(whole)
        rows, columns = 2, 8
        vocab = int(getattr(model.config, "vocab_size", 2))
        ids = torch.randint(vocab // 2, vocab, (rows, columns))
        weight = torch.randn(rows, columns, vocab)
    specs = parallelize(cut, plan, mesh)
    wrong = ""
    try:
        errors = {"logits": _relative(_backward(cut, ids, weight), _backward(whole, ids, weight))}
        theirs = {
            n: torch.zeros_like(p) if p.grad is None else p.grad
            for n, p in whole.named_parameters()
        }
        floor = _NOTHING * max(float(grad.norm()) for grad in theirs.values())
        for name, mine in _gradients(cut, specs, mesh).items():
            errors[name] = _relative_parts(specs[name], mine, theirs[name], floor)
        worst = max(errors, key=lambda name: _rank_of(errors[name]))
        if _rank_of(errors[worst]) > _TOLERANCE:
            wrong = (
                f"train as the uncut model does: on two layers {worst} is {errors[worst]:.1e} off"
            )
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        # Shapes that do not fit, on all ranks alike as all have the same plan.
        wrong = f"run: {error}"
    verdict = torch.tensor([int(not wrong)], dtype=torch.int64)
    all_reduce(verdict, mesh.control, op="min")
    if not verdict.item():
        raise PlanError(
            f"the tensor-parallel plan of the family {plan.family!r} does not "
            f"{wrong or 'train as the uncut model does (seen on another rank)'}. Give the missing "
            "rules in TensorConfig(rules={...}), often 'partial' for parameters between a column "
            "and a row layer, or use tp=1.",
            axis="tp",
        )


def _rank_of(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _randomise(model: nn.Module) -> None:
    """Make every parameter count: unit norms and zero biases hide missing shares."""
    with torch.no_grad():
        for param in model.parameters():
            scale = 0.7 / max(param.shape[-1], 1) ** 0.5 if param.ndim > 1 else 0.1
            param.add_(torch.randn_like(param) * scale)


def _backward(model: nn.Module, ids: Tensor, weight: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    (logits * weight).sum().backward()
    return logits.detach()


def _gradients(
    model: nn.Module, specs: Mapping[str, ShardSpec], mesh: ParallelMesh
) -> dict[str, Tensor]:
    """Return this rank's gradients by name, shares summed over tp."""
    found = {}
    for name, param in model.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        if specs[name].tp_partial:
            all_reduce(grad, mesh.tp).wait()
        found[name] = grad
    return found


def _relative(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm().clamp(min=1e-30))


def _relative_parts(spec: ShardSpec, mine: Tensor, theirs: Tensor, floor: float) -> float:
    """Compare this rank's part of a gradient with the same part of the whole one."""
    distance = sum(
        float((piece - _part(theirs, box)).square().sum()) for box, piece in spec.pieces(mine)
    )
    return math.sqrt(distance) / max(float(theirs.norm()), floor, 1e-30)


def _part(whole: Tensor, box: tuple[tuple[int, ...], tuple[int, ...]]) -> Tensor:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole
