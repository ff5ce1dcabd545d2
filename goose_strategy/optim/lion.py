"""Lion (Chen et al. 2023), which torch does not have: the sign of a blend of gradient and momentum.

An ordinary torch optimizer, so that it works in one process as it does on a mesh. It treats every
element alone, keeps one moment, and is stepped natively in any storage of ``ZeroConfig``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from goose_strategy.errors import ConfigError


class Lion(Optimizer):
    """Evolved sign momentum.

    Args:
        params: Parameters or groups of them, as torch's optimizers take them.
        lr: Learning rate; three to ten times smaller than AdamW's.
        betas: Of the blend that is stepped by, and of the momentum that is kept.
        weight_decay: Decoupled decay; with the smaller learning rate, as much larger than AdamW's.
        maximize: Step uphill.

    Raises:
        ConfigError: If a number is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        *,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        if not lr >= 0:
            raise ConfigError(f"lr={lr!r} must be at least 0.")
        for index, beta in enumerate(betas):
            if not 0 <= beta < 1:
                raise ConfigError(f"betas[{index}]={beta!r} must be at least 0 and below 1.")
        if not weight_decay >= 0:
            raise ConfigError(f"weight_decay={weight_decay!r} must be at least 0.")
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient.

        Args:
            closure: Computes the loss and the gradients; called first.

        Returns:
            What ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = -param.grad if group["maximize"] else param.grad
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                momentum = state["exp_avg"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                blend = momentum.mul(beta1).add_(grad, alpha=1 - beta1)
                param.sub_(blend.sign_().mul_(group["lr"]))
                momentum.mul_(beta2).add_(grad, alpha=1 - beta2)
        return loss
