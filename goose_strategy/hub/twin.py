"""A model that has not been read, as one that runs: every weight is one number, repeated.

On the meta device many models do not run at all: masks, routers and expert layers look at values.
A probe that wants to see what flows between the layers needs the shapes and some numbers, not
these numbers. A constant expanded to the weight's shape takes one element of memory.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from goose_strategy.compat.weights import compute_buffers
from goose_strategy.hub.plan import detach


def runnable_twin(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model whose meta tensors are constants on a device.

    Args:
        model: A whole transformers model; tensors that are not on the meta device are kept.
        device: Where the twin shall run.

    Returns:
        The twin; for forwards only, as the elements of one weight share their memory.

    Raises:
        PlanError: If a buffer that no file holds cannot be computed from the config.
    """
    twin = copy.deepcopy(model)
    detach(twin)
    # Kernels for many experts at once refuse weights whose elements share their memory.
    for module in twin.modules():
        choose = getattr(module, "set_experts_implementation", None)
        if choose is not None:
            choose("eager")
            break
    saved = twin.state_dict(keep_vars=True)
    derived = [n for n, b in twin.named_buffers() if b.is_meta and n not in saved]
    compute_buffers(twin, derived, device)
    for number, param in enumerate(twin.parameters()):
        if param.is_meta:
            # Different everywhere, so that equal values mean equal origins.
            value = torch.tensor(0.01 + 0.001 * (number % 89), dtype=param.dtype, device=device)
            constant = nn.Parameter(value.expand(param.shape), requires_grad=param.requires_grad)
            torch.utils.swap_tensors(param, constant)
    for name, buffer in list(twin.named_buffers()):
        if buffer.is_meta:
            prefix, _, attribute = name.rpartition(".")
            setattr(twin.get_submodule(prefix), attribute, torch.ones_like(buffer, device=device))
    for module in twin.modules():
        if type(module) is nn.Linear and module.weight.stride() == (0, 0):
            vars(module)["forward"] = _ConstantLinear(module).forward
    return twin


def solid_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a part of a twin so that its weights have memory, and its linear layers work.

    Args:
        module: The twin, or a module in it.
        memo: As for ``copy.deepcopy``.

    Returns:
        The copy; matrices hold small random numbers, as routers do something else with constants.
    """
    # A clone of an expanded tensor is written out.
    solid = copy.deepcopy(module, memo)
    for part in solid.modules():
        if isinstance(getattr(vars(part).get("forward"), "__self__", None), _ConstantLinear):
            del vars(part)["forward"]
    with torch.no_grad():
        for param in solid.parameters():
            if param.is_floating_point() and param.ndim > 1:
                param.normal_(std=0.02)
    return solid


class _ConstantLinear:
    """A linear layer with a constant weight, without writing the constant out as a matrix.

    Multiplying by the matrices of a model of 8 billion parameters takes most of a minute on a core.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear

    def forward(self, x: Tensor) -> Tensor:
        linear = self._linear
        # By way of the weight, so that the graph shows that the output depends on it.
        column = x.sum(-1, keepdim=True) * linear.weight[0, 0]
        out = column.expand(*x.shape[:-1], linear.out_features).clone()
        bias: Tensor | None = linear.bias
        return out if bias is None else out + bias
