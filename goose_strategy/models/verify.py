"""A plan that nobody has proved is tried out on a few layers of the model before it is used.

transformers' plans were written for inference, where a parameter whose gradient is a share of the
whole does no harm: its own Apertus trains wrongly for that. Here a clone of the model with random
parameters and as few layers as have every kind in them is cut as planned. Its logits and every
gradient are compared with those of an uncut copy. Of parameters that no rule names, the comparison
tells whether their gradient is a share. It costs what these layers and the embeddings cost, once.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor, nn

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.compat.transformers import small_clone
from goose_strategy.errors import PlanError
from goose_strategy.tensor_parallel.parallelize import parallelize
from goose_strategy.tensor_parallel.plan import Style, generic_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from goose_strategy.mesh.mesh import ParallelMesh
    from goose_strategy.mesh.shard import ShardSpec
    from goose_strategy.tensor_parallel.plan import TensorPlan

_TOLERANCE = 1e-3
"""Relative; rounding in fp32 is 1e-5 off, a missing share 1e-1."""
_NOTHING = 1e-4
"""Gradients below this part of the largest are rounding: a key's bias has none, for example."""


def verify_plan(model: nn.Module, plan: TensorPlan, mesh: ParallelMesh) -> TensorPlan:
    """Compare a cut clone of ``model`` with an uncut one. Collective over the world.

    Args:
        model: The whole model, before it is cut; only its class and config are looked at.
        plan: How it will be cut.
        mesh: The mesh.

    Returns:
        The plan, with what was guessed in it found out.

    Raises:
        PlanError: On all ranks, naming what differs most.
    """
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the devices' generators too, and nobody would put them back.
        torch.default_generator.manual_seed(0)
        whole = _clone(model)
        _randomise(whole)
        cut = copy.deepcopy(whole)
        rows, columns = 2, 8
        vocab = int(getattr(model.config, "vocab_size", 2))
        ids = torch.randint(vocab // 2, vocab, (rows, columns))
        weight = torch.randn(rows, columns, vocab)
    specs = parallelize(cut, plan, mesh)
    names = list(specs)
    cause: Exception | None = None
    try:
        errors = _errors(cut, whole, specs, mesh, inputs=(ids, weight))
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        # Shapes that do not fit. The others are told, in case they fit there.
        cause, errors = error, torch.full((len(names) + 1, 3), math.inf, dtype=torch.float64)
    # The largest over all ranks, so that all decide alike.
    all_reduce(errors, mesh.control, op="max")
    if cause is not None:
        _refuse(plan, f"run: {cause}", cause)
    found = dict(plan.rules)
    by_name = dict(zip([*names, "logits"], errors.tolist(), strict=True))
    for pattern in sorted(plan.guessed):
        tried = [by_name.pop(name) for name in names if generic_name(name) == pattern]
        summed, unsummed, exists = (max(column) for column in zip(*tried, strict=True))
        summed, unsummed = summed <= _TOLERANCE, unsummed <= _TOLERANCE
        if summed and unsummed and exists:
            _refuse(plan, f"tell about {pattern}: its gradient is nothing on a trial")
        if not summed and not unsummed:
            _refuse(plan, f"train as the uncut model does: on a trial {pattern} is off")
        found[pattern] = Style.PARTIAL if summed else Style.REPLICATED
    worst = max(by_name, key=lambda name: by_name[name][0])
    if by_name[worst][0] > _TOLERANCE:
        off = f"{worst} is {by_name[worst][0]:.1e} off"
        _refuse(plan, f"train as the uncut model does: on a trial {off}")
    return replace(plan, rules=found, guessed=frozenset())


def _refuse(plan: TensorPlan, how: str, cause: Exception | None = None) -> NoReturn:
    raise PlanError(
        f"the tensor-parallel plan of the family {plan.family!r} does not {how}. Give the missing "
        "rules in TensorConfig(rules={...}), 'partial' for parameters between a column and a row "
        "layer and 'replicated' for others, or use tp=1.",
        axis="tp",
    ) from cause


def _clone(model: nn.Module) -> nn.Module:
    """Return a clone with every kind of layer in it, and no more layers than that takes."""
    kinds = _kinds(model)
    most = int(getattr(model.config, "num_hidden_layers", 1))
    for layers in range(min(2, most), most + 1):
        small = small_clone(model, layers, device="meta")
        if small is not None and _kinds(small) == kinds:
            break
    clone = small_clone(model, layers)
    if clone is None:
        raise PlanError(
            f"{type(model).__name__} cannot be built anew from its config, so that its plan cannot "
            "be tried out; give TensorConfig(verify_plan=False, rules={...}), or use tp=1.",
            axis="tp",
        )
    return clone.eval()


def _kinds(model: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    return {(generic_name(name), tuple(p.shape)) for name, p in model.named_parameters()}


def _errors(
    cut: nn.Module,
    whole: nn.Module,
    specs: Mapping[str, ShardSpec],
    mesh: ParallelMesh,
    *,
    inputs: tuple[Tensor, Tensor],
) -> Tensor:
    """Return for each parameter its error as planned, its error unsummed, and if it has a gradient.

    ``[parameters + 1, 3]``; errors are relative, the last row is that of the logits. What is not a
    number counts as infinitely wrong.
    """
    logits = _relative(_backward(cut, *inputs), _backward(whole, *inputs))
    theirs = {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in whole.named_parameters()
    }
    floor = _NOTHING * max(float(grad.norm()) for grad in theirs.values())
    found = []
    for name, param in cut.named_parameters():
        spec = specs[name]
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        unsummed = _relative_parts(spec, grad, theirs[name], floor)
        if spec.tp_partial:
            all_reduce(grad, mesh.tp).wait()
        exists = bool(grad.any()) or bool(theirs[name].any())
        found.append((_relative_parts(spec, grad, theirs[name], floor), unsummed, exists))
    errors = torch.tensor([*found, (logits, logits, True)], dtype=torch.float64)
    return torch.nan_to_num(errors, nan=math.inf)


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
