"""What one process computes in fp64, and how far apart two named sets of tensors are.

transformers takes its loss from fp32 logits even in fp64, which is 7e-8 off and would hide every
smaller error; the loss here stays in the logits' precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.harness.models import IGNORED, Batch

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Reference:
    """A run in one process.

    Attributes:
        losses: Per batch: sum over valid tokens / valid tokens of the global batch.
        norms: Per step: total gradient norm before clipping.
        gradients: Per step: gradient by parameter name, before clipping.
        parameters: After the last step, by name.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the AdamW that :func:`reference_run` uses unless told otherwise."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over valid tokens / number of valid tokens, in the logits' precision.

    Args:
        logits: ``[batch, seq, vocab]``.
        labels: ``[batch, seq]``, not shifted; -100 is ignored.

    Returns:
        A scalar; zero if no token is valid.
    """
    targets = labels[:, 1:].reshape(-1)
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    total = cross_entropy(flat, targets, ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


def reference_run(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    accumulate: int = 1,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    optimizer: OptimizerFactory = adamw,
    dtype: torch.dtype = torch.float64,
) -> Reference:
    """Train a copy of ``model`` on global batches, one step per ``accumulate`` batches.

    Args:
        model: Left as it is; frozen parameters stay frozen.
        batches: Global batches; every loss is divided by ``accumulate`` before its backward.
        accumulate: Batches per optimizer step.
        max_norm: Clip the total norm to this, if given.
        norm_type: Order of the norm.
        optimizer: Makes the optimizer from the trainable parameters.
        dtype: Precision of the run.

    Returns:
        Losses, norms, gradients and parameters.
    """
    model = copy.deepcopy(model).to(dtype)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    stepper = optimizer(list(trainable.values()))
    run = Reference()
    for index, batch in enumerate(batches, start=1):
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        loss = token_loss(model(**inputs).logits, batch["labels"])
        run.losses.append(loss.item())
        (loss / accumulate).backward()
        if index % accumulate:
            continue
        run.gradients.append(named_gradients(model))
        limit = float("inf") if max_norm is None else max_norm
        norm = nn.utils.clip_grad_norm_(trainable.values(), limit, norm_type)
        run.norms.append(norm.item())
        stepper.step()
        stepper.zero_grad()
    run.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return run


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every gradient that exists, by parameter name."""
    return {
        name: p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }  # fmt: skip


def relative_error(actual: Tensor, reference: Tensor) -> float:
    """Return ``‖actual - reference‖ / ‖reference‖`` in fp64.

    Raises:
        AssertionError: If shapes differ, or the reference is zero, which proves nothing.
    """
    assert actual.shape == reference.shape, (actual.shape, reference.shape)
    size = reference.double().norm().item()
    assert size > 0, "the reference is zero: nothing is compared"
    return (actual.double() - reference.double()).norm().item() / size


def assert_close_named(
    actual: Mapping[str, Tensor], reference: Mapping[str, Tensor], rel: float
) -> None:
    """Assert that both have the same names and every tensor is within ``rel`` of its reference.

    Args:
        actual: Tensors by name.
        reference: What they should be.
        rel: Bound on :func:`relative_error`.

    Raises:
        AssertionError: Naming every tensor that is off, the worst first.
    """
    missing, extra = reference.keys() - actual.keys(), actual.keys() - reference.keys()
    assert not missing and not extra, f"missing {sorted(missing)}, unexpected {sorted(extra)}"
    assert reference, "no names: nothing is compared"
    errors = {}
    for name, expected in reference.items():
        try:
            errors[name] = relative_error(actual[name], expected)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    # Written so that NaN is off, too.
    off = {name: error for name, error in errors.items() if not error <= rel}
    worst = sorted(off.items(), key=lambda item: -item[1])
    lines = "\n".join(f"  {name}: {error:.3e}" for name, error in worst)
    assert not off, f"{len(off)} of {len(errors)} tensors are further than rel={rel:g}:\n{lines}"


def assert_close_numbers(actual: Sequence[float], reference: Sequence[float], rel: float) -> None:
    """Assert that two lists of numbers (losses, norms) agree within ``rel``, one by one."""
    assert len(actual) == len(reference), (list(actual), list(reference))
    for index, (mine, theirs) in enumerate(zip(actual, reference, strict=True)):
        gap = abs(mine - theirs) / max(abs(theirs), 1e-300)
        assert gap <= rel, f"number {index}: {mine!r} is {gap:.3e} from {theirs!r}, rel={rel:g}"
