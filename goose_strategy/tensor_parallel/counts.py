"""What a module counts, made local: its heads, its widths, arguments with an entry per head.

transformers' attention modules reshape by ``-1`` where they can. Where they use a number of their
own (``num_heads``, ``split_size``, ``config.num_attention_heads``) a rank that holds some of the
heads needs a smaller number there. DTensor keeps global shapes instead, and pays for it in every
operation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from goose_strategy.errors import PlanError

_CONFIG = "config."


class ConfigView:
    """A module's config with some numbers replaced; everything else is read from the original.

    Args:
        config: The model's config, which stays as it is: it is saved with the model.
        changed: Replaced values by name.
    """

    def __init__(self, config: Any, changed: dict[str, int]) -> None:
        self._config = config
        self._changed = changed

    def __getattr__(self, name: str) -> Any:
        """Return the replaced value, or the original's."""
        if name.startswith("__"):
            raise AttributeError(name)
        changed = self._changed
        return changed[name] if name in changed else getattr(self._config, name)


def divide_counts(
    name: str, module: nn.Module, attributes: Sequence[str], tp: int
) -> list[Callable[[], None]]:
    """Divide numbers of a module by tp.

    Args:
        name: Name of the module, for messages.
        module: Whose attributes they are.
        attributes: Their names; ``config.x`` for a number of its config.
        tp: The divisor.

    Returns:
        Functions that put the former values back.

    Raises:
        PlanError: If tp does not divide one, or it is not there.
    """
    values: dict[str, int] = {}
    for attribute in attributes:
        holder = module.config if attribute.startswith(_CONFIG) else module
        value = getattr(holder, attribute.removeprefix(_CONFIG), None)
        if not isinstance(value, int) or value % tp:
            raise PlanError(
                f"tp={tp} does not divide {name}.{attribute}={value}; choose a divisor, or use "
                f"tp=1.",
                axis="tp",
            )
        values[attribute] = value // tp
    own = {key: value for key, value in values.items() if not key.startswith(_CONFIG)}
    viewed = {k.removeprefix(_CONFIG): v for k, v in values.items() if k.startswith(_CONFIG)}
    undo = [_replace(module, key, value) for key, value in own.items()]
    if viewed:
        undo.append(_replace(module, "config", ConfigView(module.config, viewed)))
    return undo


def set_count(module: nn.Module, attribute: str, value: int) -> Callable[[], None]:
    """Set a number of a module; return what puts the former one back."""
    return _replace(module, attribute, value)


def _replace(module: nn.Module, attribute: str, value: Any) -> Callable[[], None]:
    former = getattr(module, attribute)
    setattr(module, attribute, value)
    return lambda: setattr(module, attribute, former)


def local_heads(tensor: Any, *, rows: int, heads: int, tp: int, index: int) -> Any:
    """Return the part of an attention argument that belongs to this rank's heads.

    Args:
        tensor: Something for each head, ``[rows * heads, ...]`` or ``[rows, heads, ...]``; anything
            else (a mask that all heads share, ``None``) is returned as it is.
        rows: Rows of the batch.
        heads: Heads of the whole model.
        tp: Ranks that share them.
        index: This rank's place among them.

    Returns:
        A view of ``heads / tp`` heads in the same layout.
    """
    if not isinstance(tensor, Tensor):
        return tensor
    own = heads // tp
    if tensor.ndim == 4 and tensor.shape[1] == heads:
        return tensor.narrow(1, index * own, own)
    if tensor.ndim == 3 and tensor.shape[0] == rows * heads:
        part = tensor.unflatten(0, (rows, heads)).narrow(1, index * own, own)
        return part.flatten(0, 1)
    return tensor


def argument_places(module: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Return where arguments of a module's forward are, if they are passed by position.

    Raises:
        PlanError: If the forward has no such argument.
    """
    forward = inspect.unwrap(type(module).forward)
    order = list(inspect.signature(forward).parameters)[1:]
    missing = [name for name in names if name not in order]
    if missing:
        raise PlanError(
            f"{type(module).__name__}.forward has no argument {missing[0]!r}; this version of "
            f"transformers is not supported for it, use tp=1.",
            axis="tp",
        )
    return {name: order.index(name) for name in names}
