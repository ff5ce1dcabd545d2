"""A few layers of a model, uncut, with which plans for the whole of it are compared.

transformers' own tests of its plans compare logits, where a parameter whose gradient is a share of
the whole does no harm. Here a clone with random parameters and as few layers as have every kind in
them says what the loss, the logits and every gradient have to be; any number of plans can then be
held against it. It costs what these layers and the embeddings cost.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from goose_strategy.comm.collectives import all_reduce
from goose_strategy.compat.transformers import (
    install_loss,
    is_causal_lm,
    output_embedding,
    small_clone,
    text_size,
)
from goose_strategy.errors import PlanError
from goose_strategy.pipeline_parallel.probe import call_settings
from goose_strategy.tensor_parallel.head import causal_lm_loss
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
_ROWS, _COLUMNS = 2, 8
MISFITS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    AttributeError,
    KeyError,
    AssertionError,
    ZeroDivisionError,
)
"""What models raise where shapes do not fit, each in its own way."""


class Verdict(NamedTuple):
    """What a trial found out about a plan.

    Attributes:
        plan: The plan with what was guessed in it found out; ``None`` if it is wrong.
        reason: What it does not do.
        cause: The error that the cut clone raised on this rank, if it did.
    """

    plan: TensorPlan | None
    reason: str = ""
    cause: Exception | None = None


class Trial:
    """One uncut clone and what it computes.

    Args:
        model: The whole model, before it is cut; only its class and config are looked at.
        mesh: The mesh.

    Attributes:
        mesh: The mesh.
        clone: The uncut clone, in evaluation mode, in fp32 on the host.
        learns: Whether it computes its loss as causal language models do.

    Raises:
        PlanError: If the model cannot be built anew, or does not run by itself.
    """

    def __init__(self, model: nn.Module, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would seed the devices' generators too; nobody would put them back.
            torch.default_generator.manual_seed(0)
            self.clone = build_clone(model)
            _randomise(self.clone)
            vocab = text_size(model, "vocab_size") or 2
            self.ids = torch.randint(vocab // 2, vocab, (_ROWS, _COLUMNS))
            self._before = copy.deepcopy(self.clone)
            self._noise = torch.Generator().manual_seed(1)
            self.learns = is_causal_lm(self.clone)
            try:
                self._expected = self._run(self.clone)
            except MISFITS as error:
                raise PlanError(
                    f"{type(model).__name__} of {_COLUMNS} tokens does not run by itself, so that "
                    f"no plan can be tried out on it: {error}",
                    axis="tp",
                ) from error
        self._grads = {
            name: torch.zeros_like(param) if param.grad is None else param.grad
            for name, param in self.clone.named_parameters()
        }
        most = max(float(grad.norm()) for grad in self._grads.values())
        if not 0 < most < math.inf:
            # Any plan would agree with that.
            raise PlanError(
                f"{type(model).__name__} has gradients of norm {most} on {_COLUMNS} random tokens, "
                "so that no plan can be tried out on it. Give rules in TensorConfig(rules={...}) "
                "with verify_plan=False, or use tp=1.",
                axis="tp",
            )
        self._floor = _NOTHING * most

    def judge(self, plan: TensorPlan) -> Verdict:
        """Cut a copy of the clone as planned and compare. Collective over the world.

        Args:
            plan: How it is cut.

        Returns:
            The same verdict on all ranks.
        """
        cut = copy.deepcopy(self._before)
        cause: Exception | None = None
        names = [name for name, _ in cut.named_parameters()]
        try:
            specs = parallelize(cut, plan, self.mesh)
            errors = self._errors(cut, specs)
        except (PlanError, *MISFITS) as error:
            # The others are told, in case it fits there.
            cause, errors = error, torch.full((len(names) + 1, 3), math.inf, dtype=torch.float64)
        # The largest over all ranks, so that all decide alike.
        all_reduce(errors, self.mesh.control, op="max")
        if cause is not None:
            return Verdict(None, f"run: {cause}", cause)
        return _judge(plan, dict(zip([*names, "logits"], errors.tolist(), strict=True)))

    def look(self) -> Tensor:
        """Run the uncut clone once more, for whoever watches it; return its logits."""
        return _logits(self.clone(input_ids=self.ids, **call_settings(self.clone)))

    def learns_in(self, name: str) -> bool:
        """Return whether a parameter of the clone has a gradient, so that it can be compared."""
        return name in self._grads and bool(self._grads[name].any())

    def _run(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Run a clone as training does, and return its logits and its loss.

        What the head and the loss do is tried together: with labels, logits stay where they are.
        """
        settings = call_settings(model)
        if not self.learns:
            logits = _logits(model(input_ids=self.ids, **settings))
            noise = torch.randn(logits.shape, generator=self._noise.manual_seed(1))
            loss = (logits * noise).sum()
            loss.backward()
            return logits.detach(), loss.detach()
        head = output_embedding(model)
        restore = install_loss(model, causal_lm_loss(head[1] if head else None))
        try:
            loss = model(input_ids=self.ids, labels=self.ids, **settings).loss
            loss.backward()
            with torch.no_grad():
                logits = _logits(model(input_ids=self.ids, **settings))
        finally:
            restore()
        return logits, loss.detach()

    def _errors(self, cut: nn.Module, specs: Mapping[str, ShardSpec]) -> Tensor:
        """Return each parameter's error as planned, its error unsummed, and if it has a gradient.

        ``[parameters + 1, 3]``; errors are relative, the last row is that of logits and loss. What
        is not a number counts as infinitely wrong.
        """
        pairs = zip(self._run(cut), self._expected, strict=True)
        outputs = max(_relative(mine, theirs) for mine, theirs in pairs)
        found = []
        for name, param in cut.named_parameters():
            spec, theirs = specs[name], self._grads[name]
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            unsummed = _relative_parts(spec, grad, theirs, self._floor)
            if spec.tp_partial:
                all_reduce(grad, self.mesh.tp).wait()
            exists = bool(grad.any()) or bool(theirs.any())
            found.append((_relative_parts(spec, grad, theirs, self._floor), unsummed, exists))
        errors = torch.tensor([*found, (outputs, outputs, True)], dtype=torch.float64)
        return torch.nan_to_num(errors, nan=math.inf)


def _judge(plan: TensorPlan, by_name: dict[str, list[float]]) -> Verdict:
    found = dict(plan.rules)
    names = [name for name in by_name if name != "logits"]
    for pattern in sorted(plan.guessed):
        tried = [by_name.pop(name) for name in names if generic_name(name) == pattern]
        if not tried:
            continue
        summed, unsummed, exists = (max(column) for column in zip(*tried, strict=True))
        is_share, is_whole = summed <= _TOLERANCE, unsummed <= _TOLERANCE
        if is_share and is_whole and exists:
            return Verdict(None, f"tell about {pattern}: its gradient is nothing on a trial")
        if not is_share and not is_whole:
            return Verdict(None, f"train as the uncut model does: on a trial {pattern} is off")
        found[pattern] = Style.PARTIAL if is_share else Style.REPLICATED
    worst = max(by_name, key=lambda name: by_name[name][0])
    if by_name[worst][0] > _TOLERANCE:
        off = f"{worst} is {by_name[worst][0]:.1e} off"
        return Verdict(None, f"train as the uncut model does: on a trial {off}")
    return Verdict(replace(plan, rules=found, guessed=frozenset()))


def build_clone(model: nn.Module) -> nn.Module:
    """Build a clone with every kind of layer in it, and no more layers than that takes.

    Args:
        model: Only its class, config and parameters' names and shapes are looked at.

    Returns:
        A clone with random parameters, in evaluation mode.

    Raises:
        PlanError: If it cannot be built from its config.
    """
    kinds = _kinds(model)
    most = text_size(model, "num_hidden_layers") or 1
    layers = most
    for fewer in range(min(2, most), most):
        small = small_clone(model, fewer, device="meta")
        if small is not None and _kinds(small) == kinds:
            layers = fewer
            break
    clone = small_clone(model, layers)
    if clone is None:
        raise PlanError(
            f"{type(model).__name__} cannot be built anew from its config, so that its plan cannot "
            "be tried out; give TensorConfig(verify_plan=False, rules={...}), or use tp=1.",
            axis="tp",
        )
    return clone.requires_grad_(requires_grad=True).eval()


def _kinds(model: nn.Module) -> set[tuple[str, tuple[int, ...]]]:
    return {(generic_name(name), tuple(p.shape)) for name, p in model.named_parameters()}


def _randomise(model: nn.Module) -> None:
    """Make every parameter count: unit norms and zero biases hide missing shares."""
    with torch.no_grad():
        for param in model.parameters():
            scale = 0.7 / max(param.shape[-1], 1) ** 0.5 if param.ndim > 1 else 0.1
            param.add_(torch.randn_like(param) * scale)


def _logits(output: Any) -> Tensor:
    logits: Tensor = output.logits
    return logits


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
