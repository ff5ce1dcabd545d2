"""Which optimizers `cuda_ops` steps, and how their groups become its hyperparameters.

The user keeps an ordinary ``torch.optim`` instance: its class says the rule, its groups the
numbers, at every step anew, so that schedulers work as always. What a native step cannot do is
named, never ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, optim
from torch.optim import Optimizer

from cuda_ops.state import Algorithm
from goose_strategy.optim.lion import Lion

Row = tuple[float | Tensor, ...]
"""Hyperparameters of a group in the order of `cuda_ops.state.Hyper`."""


@dataclass(frozen=True)
class Rule:
    """How one kind of optimizer is stepped.

    Attributes:
        algorithm: The update rule.
        first: Name of the first moment in the optimizer's state.
        second: Name of the second moment, if there is one.
        counts: Whether the state has a ``step`` of its own.
    """

    algorithm: Algorithm
    first: str
    second: str | None = None
    counts: bool = False


ADAM = Rule(Algorithm.ADAM, "exp_avg", "exp_avg_sq", counts=True)
LION = Rule(Algorithm.LION, "exp_avg")
SGD = Rule(Algorithm.SGD, "momentum_buffer")

_RULES: tuple[tuple[type[Optimizer], Rule], ...] = (
    (optim.AdamW, ADAM),
    (optim.Adam, ADAM),
    (optim.SGD, SGD),
    (Lion, LION),
)
NATIVE = ", ".join(kind.__name__ for kind, _ in _RULES)
"""Names of the optimizers that can be stepped natively, for messages."""

_IMPOSSIBLE = ("amsgrad", "differentiable")


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return how an optimizer is stepped natively; ``None`` if it is not one of those."""
    step = inspect.unwrap(type(optimizer).step)
    found = (rule for kind, rule in _RULES if step is inspect.unwrap(kind.step))
    return next(found, None)


def obstacle(optimizer: Optimizer) -> str | None:
    """Return as ``name=value`` why an optimizer cannot be stepped natively, or ``None``."""
    if rule_of(optimizer) is None:
        return f"optimizer={type(optimizer).__name__}"
    for group in optimizer.param_groups:
        for name in _IMPOSSIBLE:
            if group.get(name):
                return f"{name}={group[name]!r}"
    return None


def hyper_row(rule: Rule, group: Mapping[str, Any]) -> Row:
    """Return the hyperparameters of one parameter group."""
    sign = -1.0 if group.get("maximize") else 1.0
    lr, decay = group["lr"], group["weight_decay"]
    if rule.algorithm == Algorithm.SGD:
        momentum = group["momentum"]
        # Without momentum torch does not dampen either.
        dampening = group["dampening"] if momentum else 0.0
        return lr, momentum, dampening, 0.0, decay, sign, float(group["nesterov"]), 0.0
    beta1, beta2 = group["betas"]
    decoupled = rule is LION or bool(group.get("decoupled_weight_decay", False))
    return lr, beta1, beta2, group.get("eps", 0.0), decay, sign, 0.0, float(decoupled)


def keeps_first(rule: Rule, optimizer: Optimizer) -> bool:
    """Whether the optimizer has a first moment at all: SGD without momentum has none."""
    return rule is not SGD or any(group["momentum"] for group in optimizer.param_groups)
