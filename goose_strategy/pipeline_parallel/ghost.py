"""Keep a module whole where its weights are not: ghosts that cost no memory.

A stage keeps the model's class, config and module tree, so its forward reads
``embed_tokens.weight.dtype`` or calls ``wpe(position_ids)`` on every stage. A ghost is a zero of
the weight's shape, dtype and device with all strides 0: one element of storage. It is no parameter,
so ``parameters()``, ``state_dict()`` and optimizers see what the stage really has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps the hooks around its forward and backward."""


class Ghosts:
    """The ghosts of one module; moves them along with the module.

    Args:
        module: The module whose tensors were replaced.
        names: Names of the replaced tensors; plain attributes of the module from now on.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self._module = module
        self.names = set(names)

    def apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        """Do what ``module._apply`` does (``to``, ``cuda``, ``half``, ...), for ghosts too.

        torch's own would give a moved ghost the storage of the whole weight.

        Args:
            fn: Makes the new tensor.
            *args: Further arguments of torch's.
            **kwargs: The same.

        Returns:
            The module.
        """
        module = self._module
        type(module)._apply(module, fn, *args, **kwargs)  # noqa: SLF001 - called by its public ones
        # A name is gone once somebody has set a parameter of that name again.
        for name in self.names & module.__dict__.keys():
            ghost: Tensor = module.__dict__[name]
            module.__dict__[name] = _ghost(fn(ghost.as_strided((), ())), ghost.shape)
        return module

    def place(self, device: torch.device) -> None:
        """Put ghosts that are on the meta device where the stage's own tensors are."""
        module = self._module
        for name in self.names & module.__dict__.keys():
            ghost: Tensor = module.__dict__[name]
            if ghost.is_meta:
                empty = torch.empty((), dtype=ghost.dtype, device=device)
                module.__dict__[name] = _ghost(empty, ghost.shape)


def place_ghosts(model: nn.Module, device: torch.device) -> None:
    """Move the ghosts of a model that was cut on the meta device; without values, none is lost."""
    for module in model.modules():
        ghosts = getattr(module.__dict__.get("_apply"), "__self__", None)
        if isinstance(ghosts, Ghosts):
            ghosts.place(device)


def make_ghosts(module: nn.Module, names: Collection[str]) -> None:
    """Replace parameters or buffers of a module (not of its submodules) by ghosts, in place.

    Args:
        module: Their owner.
        names: Their names in it.
    """
    for name in names:
        tensor: Tensor = getattr(module, name)
        empty = torch.empty((), dtype=tensor.dtype, device=tensor.device)
        delattr(module, name)
        module.__dict__[name] = _ghost(empty, tensor.shape)
    if not names:
        return
    ghosts = getattr(module.__dict__.get("_apply"), "__self__", None)
    if isinstance(ghosts, Ghosts):
        ghosts.names.update(names)
    else:
        # A bound method of a plain object, so that a deep copy of the model has its own ghosts.
        module.__dict__["_apply"] = Ghosts(module, names).apply


def drop_hooks(module: nn.Module) -> None:
    """Remove the hooks around a module's forward and backward, which its stand-in must not run."""
    for name in HOOKS:
        # There is no public way to remove a hook that somebody else registered.
        getattr(module, name).clear()


def _ghost(scalar: Tensor, shape: torch.Size) -> Tensor:
    # The value is never used, but what ``to_empty`` leaves in it might be a NaN.
    with torch.no_grad():
        return scalar.detach().zero_().expand(shape)
