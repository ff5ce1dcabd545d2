"""The private APIs of torch that goose-strategy leans on, one function each.

Everything here may move in any torch release; the test of the same name says what breaks then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, distributed_c10d
from torch.optim import Optimizer
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import nn


def default_store() -> Store:
    """Return the store through which the default process group met.

    torch keeps it in a private table. The watchdog needs it because it is the one channel between
    ranks that works while a collective hangs.

    Raises:
        RuntimeError: If there is no default process group.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no default process group; call init_process_group first.")
    store: Store = distributed_c10d._get_default_store()
    return store


def clone_store(store: Store) -> Store:
    """Return a second connection to ``store``, for use by another thread.

    One connection serves one request at a time, so a thread that polls must not share the one on
    which a rendezvous may block. ``Store.clone`` is bound but not documented.
    """
    clone: Store = store.clone()  # type: ignore[attr-defined]
    return clone


def plain_functions() -> AbstractContextManager[None]:
    """Let tensors of subclasses be treated as plain ones inside the block.

    What a ``__torch_function__`` calls would come back to it otherwise. torch documents the method
    and not this, the only way to call the function itself without losing gradient modes.
    """
    block: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return block


def inside_backward() -> bool:
    """Return whether this thread runs a node of autograd's graph at present.

    That is where ``torch.utils.checkpoint`` calls a function for the second time. torch tells its
    own modules by the number of the running graph task, which is -1 outside.
    """
    running: int = torch._C._current_graph_task_id()
    return running != -1


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor, or another one with the same storage, was written to in place.

    torch documents the counter in its notes on autograd and has no public name for it. Tensors made
    in inference mode keep none.
    """
    if tensor.is_inference():
        return 0
    version: int = tensor._version
    return version


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether anything was hooked behind a module's own forward.

    ``register_forward_hook`` is public; there is no public way to ask whether somebody called it.
    """
    return bool(module._forward_hooks)


class ShardedGradScaler(torch.amp.GradScaler):
    """torch's scaler over gradients that it cannot see: the search and the division are handed out.

    ``GradScaler`` has no public place for that. Its own are ``_unscale_grads_``, which returns the
    infinities it found by device, and ``_scale``, which does not exist before the first loss; a
    pipeline has to know it before. Fused optimizers would unscale by themselves
    (``_step_supports_amp_scaling``), which is not offered to them here.

    Attributes:
        unscale: Divides an optimizer's gradients and says whether they were finite; ``None`` for
            optimizers it does not know, which torch then treats itself.
    """

    unscale: Callable[[Optimizer, Tensor], Tensor | None]

    @classmethod
    def over(
        cls, scaler: torch.amp.GradScaler, unscale: Callable[[Optimizer, Tensor], Tensor | None]
    ) -> ShardedGradScaler:
        """Return a scaler with the settings and the state of another one.

        Args:
            scaler: The user's, or Lightning's.
            unscale: See the class.
        """
        made = cls.__new__(cls)
        vars(made).update(vars(scaler))
        made.unscale = unscale
        return made

    def current(self, device: torch.device) -> Tensor | None:
        """Return the scale, an fp32 scalar that no later update changes; ``None`` if disabled."""
        if not self.is_enabled():
            return None
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        scale = self._scale
        return None if scale is None else scale.clone()

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = self.unscale(optimizer, inv_scale)
        if found is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return {found.device: found}

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        supports = vars(optimizer).pop("_step_supports_amp_scaling", None)
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            if supports is not None:
                vars(optimizer)["_step_supports_amp_scaling"] = supports


def put_children(module: nn.Module, children: Mapping[str, nn.Module]) -> None:
    """Put other modules into the places of a module's children, for a moment.

    ``setattr`` does it in public, in two microseconds each; here it is done for the layers of a
    stack before and after each of a stage's forwards.
    """
    module._modules.update(children)


def fresh_view(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor that nobody else holds in another shape, not as a view of it.

    What a custom autograd function returns must not be a view if others are to write into it. torch
    ends its own ``F.linear`` with this operator, which has no public name.
    """
    viewed: Tensor = torch.ops.aten._unsafe_view.default(tensor, shape)
    return viewed


def embedding_backward(grad: Tensor, ids: Tensor, *, rows: int, padding: int) -> Tensor:
    """Return the gradient ``[rows, width]`` of what ``F.embedding`` looked up.

    torch has a public function for every matrix product and none for this kernel; ``index_add``
    sums in another order.

    Args:
        grad: ``[..., width]``.
        ids: ``[...]``, int64 or int32.
        rows: Rows of the embedding.
        padding: Id that gets no gradient; -1 for none.
    """
    backward = torch.ops.aten.embedding_dense_backward.default
    found: Tensor = backward(grad, ids, rows, padding, False)  # noqa: FBT003
    return found


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's calls are compiled, by ``module.compile()`` or a wrapper of torch.

    Neither can be asked for in public.
    """
    return module._compiled_call_impl is not None or is_compiled_wrapper(module)


def is_compiled_wrapper(module: nn.Module) -> bool:
    """Return whether a module is what ``torch.compile(module)`` returns, around another one."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def drop_compiled(module: nn.Module) -> None:
    """Undo ``module.compile()``; torch has no public way back."""
    module._compiled_call_impl = None


def quiet_hooks(leaf: Tensor) -> None:
    """Let hooks on a leaf be called with gradients only, from now on.

    Where a backward has nothing for a leaf that is in its graph, autograd calls what
    ``register_hook`` installed with ``None``, which hardly any hook expects, and then what
    ``register_post_accumulate_grad_hook`` installed, as if something had been accumulated. There is
    no public way to see the hooks, and none to end a path of the graph at run time.

    Hooks that are installed later need another call.
    """
    before: dict[int, Any] | None = leaf._backward_hooks
    after: dict[int, Any] | None = leaf._post_accumulate_grad_hooks
    gate: _Gate | None = None
    for key, hook in (before or {}).items():
        if type(hook) is _Gate:
            gate = hook
        elif type(hook) is not _Quiet and before is not None:
            before[key] = _Quiet(hook)
    if not after:
        return
    if gate is None:
        gate = _Gate()
        leaf.register_hook(gate)
    for key, hook in after.items():
        if type(hook) is not _QuietAfter:
            after[key] = _QuietAfter(hook, gate)


def hooks_of(leaf: Tensor) -> list[Callable[..., Any]]:
    """Return what is called with a leaf's gradient, before and behind its accumulation.

    torch has no public way to see it. Hooks that `quiet_hooks` wraps are returned as they were.
    """
    found: list[Callable[..., Any]] = []
    for hooks in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks):
        found += [getattr(hook, "_hook", hook) for hook in (hooks or {}).values()]
    return [hook for hook in found if type(hook) is not _Gate]


class _Gate:
    """A hook that notes whether there was a gradient, for those behind the accumulation."""

    __slots__ = ("is_open",)

    def __call__(self, gradient: Tensor | None) -> None:
        self.is_open = gradient is not None


class _Quiet:
    """A hook before the accumulation, left alone where there is no gradient."""

    __slots__ = ("_hook",)

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self._hook(gradient)


class _QuietAfter:
    """A hook behind the accumulation, left alone where there is no gradient."""

    __slots__ = ("_gate", "_hook")

    def __init__(self, hook: Callable[[Tensor], None], gate: _Gate) -> None:
        self._hook = hook
        self._gate = gate

    def __call__(self, leaf: Tensor) -> None:
        if self._gate.is_open:
            self._hook(leaf)
