"""Parameters whose values are still in files, and say so when somebody wants to see them.

On the meta device torch computes on: a forward returns a loss without a value, an optimizer steps,
``nn.init.normal_`` does nothing, ``torch.save`` writes nothing, and ``Module.to`` advises
``to_empty``, which leaves random memory. Each of these would train on numbers that nobody chose, so
a parameter that `from_pretrained` made refuses them by name until the set-up has read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from goose_strategy.compat.torch import plain_functions
from goose_strategy.errors import ConfigError

_NAME = "goose_name"
_ALLOWED_IN_PLACE = frozenset({"requires_grad_", "detach_", "share_memory_"})
_VALUES = frozenset(
    {"item", "tolist", "numpy", "cpu", "cuda", "__bool__", "__float__", "__int__", "__index__"}
)


def _torch_function(_cls: type, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Run one function of torch, unless it reads or writes a value that is not there."""
    kwargs = kwargs or {}
    with plain_functions():
        held = [tensor for tensor in _tensors([*args, *kwargs.values()]) if _is_unread(tensor)]
        if not held:
            return func(*args, **kwargs)
        others = [tensor for tensor in _tensors([*args, *kwargs.values()]) if not tensor.is_meta]
        called = getattr(func, "__name__", "")
        reads = getattr(func, "__self__", None) if called == "__get__" else None
        if reads is Tensor.device:
            # Where the values are: adapters put theirs beside them, and would lose them elsewhere.
            return torch.device("cpu")
        if called in _VALUES or others or _writes(called):
            _refuse(held[0], called)
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as err:
            _refuse(held[0], called, err)
        if called == "empty_like" and isinstance(result, Tensor) and not result.is_meta:
            _refuse(held[0], "to_empty")
        if reads is Tensor.data or called == "detach":
            return _named(result.as_subclass(UnreadTensor), getattr(held[0], _NAME, ""))
    return result


class UnreadTensor(Tensor):
    """The data of a parameter that has not been read: what ``state_dict()`` holds."""

    __torch_function__: Any = classmethod(_torch_function)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Refuse to be pickled, which would keep nothing."""
        _refuse(self, "pickle")


class UnreadParameter(nn.Parameter):
    """A parameter on the meta device whose values are still in files."""

    __torch_function__: Any = classmethod(_torch_function)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy it: a copy has not been read either."""
        if id(self) in memo:
            known: Tensor = memo[id(self)]
            return known
        with plain_functions():
            copied: Tensor = UnreadParameter(self.data.clone(), self.requires_grad)
        memo[id(self)] = copied
        _named(copied, getattr(self, _NAME, ""))
        return copied

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        """Refuse to be pickled, which would keep nothing."""
        _refuse(self, "pickle")


def guard(parameters: Mapping[str, nn.Parameter]) -> None:
    """Make parameters on the meta device refuse to be read or written.

    Args:
        parameters: By the names that refusals shall show.
    """
    for name, param in parameters.items():
        _make(param, UnreadParameter)
        _named(param, name)


@contextmanager
def unguarded(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make guarded parameters ordinary ones, while they are cut; guarded again if that fails."""
    held = [param for param in parameters if isinstance(param, UnreadParameter)]
    for param in held:
        _make(param, nn.Parameter)
    try:
        yield
    except BaseException:
        for param in held:
            if param.is_meta:
                _make(param, UnreadParameter)
        raise


def forget_name(param: nn.Parameter) -> dict[str, Any]:
    """Return the attributes that others have put on a parameter, without the guard's."""
    return {name: value for name, value in vars(param).items() if name != _NAME}


def _make(param: Any, cls: type[nn.Parameter]) -> None:
    # As torch does with the parameters of its lazy modules.
    param.__class__ = cls


def _is_unread(tensor: Tensor) -> bool:
    return isinstance(tensor, (UnreadTensor, UnreadParameter))


def _writes(called: str) -> bool:
    in_place = called.endswith("_") and not called.endswith("__")
    if called.startswith("__i") and called.endswith("__"):
        in_place = called not in ("__init__", "__iter__", "__invert__", "__index__", "__int__")
    return (in_place and called not in _ALLOWED_IN_PLACE) or called == "__setitem__"


def _named(tensor: Any, name: str) -> Any:
    vars(tensor)[_NAME] = name
    return tensor


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _refuse(tensor: Tensor, called: str, cause: BaseException | None = None) -> NoReturn:
    with plain_functions():
        name = vars(tensor).get(_NAME) or f"a parameter of shape={tuple(tensor.shape)}"
    raise ConfigError(
        f"{called or 'this'}() needs the values of {name}, which goose_strategy.from_pretrained "
        "has not read: each rank reads its own part when the model is set up. Call "
        "fabric.setup(model) first (with the Trainer: use a hook after the set-up); to use the "
        "model without the strategy, load it with "
        "transformers.AutoModelForCausalLM.from_pretrained."
    ) from cause
