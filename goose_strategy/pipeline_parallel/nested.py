"""Find and replace tensors inside the arguments of a call, by path.

``torch.utils._pytree`` does more and is private; the arguments of a layer are tensors in tuples,
lists and dicts, seldom more than one deep.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

Path: TypeAlias = tuple[int | str, ...]
"""Position or name of an argument, then keys and indices inside it."""


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Path, Tensor]:
    """Return every tensor among the arguments of a call.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.

    Returns:
        The tensors by path, in the order of the arguments.
    """
    return dict([*_walk((), tuple(args)), *_walk((), dict(kwargs))])


def tensors_in(value: Any) -> dict[Path, Tensor]:
    """Return every tensor in a value; the path of a bare tensor is ``()``."""
    return dict(_walk((), value))


def replace_tensors(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], new: Mapping[Path, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with some replaced.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        new: What to put where. A path may lead to anything, not only to a tensor.

    Returns:
        New containers along the paths; nothing is changed in place.
    """
    out_args, out_kwargs = args, dict(kwargs)
    for path, tensor in new.items():
        if isinstance(path[0], int):
            out_args = _put(out_args, path, tensor)
        else:
            out_kwargs = _put(out_kwargs, path, tensor)
    return out_args, out_kwargs


def has_place(args: Sequence[Any], kwargs: Mapping[str, Any], path: Path) -> bool:
    """Tell whether the arguments of a call have something at a path, be it ``None``."""
    container: Any = args if isinstance(path[0], int) else kwargs
    for key in path:
        if isinstance(container, Mapping):
            present = key in container
        else:
            sequence = isinstance(container, (tuple, list))
            present = sequence and isinstance(key, int) and key < len(container)
        if not present:
            return False
        container = container[key]
    return True


def show(path: Path) -> str:
    """Return a path as a reader would write it: ``position_embeddings[0]``, ``argument 0``."""
    head = path[0] if isinstance(path[0], str) else f"argument {path[0]}"
    return f"{head}{''.join(f'[{key!r}]' for key in path[1:])}"


def _walk(path: Path, value: Any) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk((*path, key), item)
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _walk((*path, index), item)


def _put(container: Any, path: Path, new: Tensor) -> Any:
    if not path:
        return new
    key: Any = path[0]
    if isinstance(container, Mapping):
        return {**container, key: _put(container[key], path[1:], new)}
    items = list(container)
    items[key] = _put(items[key], path[1:], new)
    return tuple(items) if isinstance(container, tuple) else items
