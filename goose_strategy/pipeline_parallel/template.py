"""Imitate what a layer returns when the layer is not there."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from torch import Tensor

from goose_strategy.errors import PlanError

if TYPE_CHECKING:
    from goose_strategy.pipeline_parallel.nested import Path


class Place(Enum):
    """What stands in a template for a tensor."""

    HIDDEN = "hidden states"


def make_template(returned: Any, path: Path, layer: str) -> Any:
    """Return the structure of what a layer returned, without its tensors.

    Args:
        returned: What the layer returned.
        path: Where in it the hidden states are.
        layer: Name of the layer, for the message.

    Returns:
        The same tuples, lists and dicts, with `Place.HIDDEN` at ``path`` and ``None`` for every
        other tensor and object; numbers, strings and ``None`` stay.

    Raises:
        PlanError: If it holds a container that cannot be rebuilt.
    """
    if isinstance(returned, Tensor):
        return None if path else Place.HIDDEN
    if type(returned) in (tuple, list):
        return type(returned)(
            make_template(item, path[1:], layer) if path[:1] == (index,) else _constant(item)
            for index, item in enumerate(returned)
        )
    if type(returned) is dict:
        return {
            key: make_template(item, path[1:], layer) if path[:1] == (key,) else _constant(item)
            for key, item in returned.items()
        }
    raise PlanError(
        f"{layer} returns a {type(returned).__name__}; only tensors, tuples, lists and dicts can "
        "be handed through where the layer is not there. Use pp=1.",
        axis="pp",
    )


def fill_template(template: Any, hidden: Tensor) -> Any:
    """Return a template with the hidden states in their place."""
    if template is Place.HIDDEN:
        return hidden
    if isinstance(template, (tuple, list)):
        return type(template)(fill_template(item, hidden) for item in template)
    if isinstance(template, Mapping):
        return {key: fill_template(item, hidden) for key, item in template.items()}
    return template


def _constant(value: Any) -> Any:
    """Return a value that does not depend on the input, ``None`` for one that might."""
    return value if isinstance(value, (int, float, str)) else None
